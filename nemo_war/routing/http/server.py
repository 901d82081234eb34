"""The router as a server: its paths, who may use them, and how refusals are told."""

from __future__ import annotations

import asyncio
import hmac
import logging
import resource
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CONTENT_TYPE_LATEST

from nemo_war.errors import ConfigError
from nemo_war.routing.http.profiles import NO_REPLICA, RefusalError, error_body, invalid, status_for
from nemo_war.routing.http.router import Router
from nemo_war.routing.http.settings import RouterSettings
from nemo_war.routing.http.stream import ClientGoneError

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CLIENT_GONE = 499
"""Status under which requests are counted whose client did not wait; nginx made it customary."""
BACKLOG = 4096
"""A step starts with all its trajectories at once."""
_MIB = 1 << 20

_log = logging.getLogger(__name__)


class Server:
    """The paths of a router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._running: set[asyncio.Task[Any]] = set()
        self._expected = f"Bearer {router.settings.token}".encode() if router.settings.token else None

    def runner(self) -> web.AppRunner:
        """What serves it; nothing is started yet."""
        return web.AppRunner(
            self.application(),
            access_log=None,
            logger=_protocol_log(),
            handler_cancellation=True,
            shutdown_timeout=self._router.settings.grace_s,
        )

    def abort(self) -> None:
        """End all requests that are running."""
        for task in self._running:
            task.cancel()

    def application(self) -> web.Application:
        """All paths; whatever is not named is not found."""
        router, size = self._router, self._router.settings.max_body_mib * _MIB
        application = web.Application(client_max_size=size)
        application.cleanup_ctx.append(self._connected)
        add = application.router.add_route
        for path in ("/v1/chat/completions", "/v1/completions"):
            add("POST", path, self._endpoint(path, router.turn))
        add("GET", "/v1/models", self._endpoint("/v1/models", router.plain))
        add("POST", "/tokenize", self._endpoint("/tokenize", router.plain))
        add("DELETE", "/trajectories/{name:.+}", self._endpoint("/trajectories", self._end))
        add("GET", "/state", self._endpoint("/state", self._state))
        add("GET", "/metrics", self._endpoint("/metrics", self._metrics))
        add("GET", "/health", self._health)
        add("*", "/{path:.*}", self._endpoint("other", _not_found))
        return application

    def _endpoint(self, path: str, handler: _Handler) -> _Handler:
        """A handler that is counted, and whose refusals are answers."""
        metrics = self._router.metrics

        async def serve(request: web.Request) -> web.StreamResponse:
            started, status = time.monotonic(), _CLIENT_GONE
            task = asyncio.current_task()
            assert task is not None
            self._running.add(task)
            try:
                response = await self._answer(handler, request)
                status = response.status
                return response
            finally:
                self._running.discard(task)
                metrics.requests.labels(path, status).inc()
                metrics.request_seconds.labels(path).observe(time.monotonic() - started)

        return serve

    async def _answer(self, handler: _Handler, request: web.Request) -> web.StreamResponse:
        try:
            self._authorize(request)
            return await handler(request)
        except RefusalError as refusal:
            return self._refused(refusal)
        except ClientGoneError:
            return web.Response(status=_CLIENT_GONE)  # which nobody will see
        except Exception:
            _log.exception("%s %s failed", request.method, request.path)
            return self._refused(RefusalError(500, "internal_error", "the router failed; see its log"))

    def _authorize(self, request: web.Request) -> None:
        presented = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if self._expected is not None and not hmac.compare_digest(presented, self._expected):
            raise RefusalError(401, "authentication_error", "the bearer token is missing or wrong")

    def _refused(self, refusal: RefusalError) -> web.Response:
        settings = self._router.settings
        told = settings.no_replica_status if refusal.kind == NO_REPLICA else refusal.status
        status = status_for(settings.profile, told)
        body = error_body(status, refusal.kind, str(refusal))
        response = web.Response(status=status, body=body, content_type="application/json")
        if refusal.retry_after_s and status == told:
            response.headers["Retry-After"] = str(refusal.retry_after_s)
        return response

    async def _connected(self, application: web.Application) -> AsyncIterator[None]:
        async with self._router.running():
            yield

    async def _end(self, request: web.Request) -> web.Response:
        self._router.trajectories.end(request.match_info["name"])
        return web.Response(status=204)

    async def _state(self, request: web.Request) -> web.Response:
        return web.json_response(self._router.state())

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._router.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._router.replicas.healthy() else 503)


def _protocol_log() -> logging.Logger:
    """Where aiohttp logs. What is no HTTP is left out: its client could fill any log with it, and is told,
    unless it was the rest of a request that had its answer already."""
    log = logging.getLogger(f"{__name__}.protocol")
    log.addFilter(_is_not_the_clients)
    return log


def _is_not_the_clients(record: logging.LogRecord) -> bool:
    theirs = (HttpProcessingError, web.RequestPayloadError)
    return record.exc_info is None or not isinstance(record.exc_info[1], theirs)


async def _not_found(request: web.Request) -> web.StreamResponse:
    raise invalid(f"there is no {request.method} {request.path}", 404)


def serve(settings: RouterSettings, say: Callable[[str], None]) -> None:
    """Run a router until it is interrupted.

    Args:
        settings: of the router.
        say: takes a line for the operator.

    Raises:
        ConfigError: it cannot listen there.
        KeyboardInterrupt: in the end, after running requests were given their time.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each request takes two connections
    try:
        asyncio.run(_serve(settings, say))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _serve(settings: RouterSettings, say: Callable[[str], None]) -> None:
    router = Router(settings, say)
    server = Server(router)
    _stop_on_signals(server)
    running = server.runner()
    try:
        await running.setup()
        await _listen(running, settings)
        host, port = running.addresses[0][:2]
        there = f"{len(router.replicas.healthy())} of {len(settings.replicas)} replicas"
        say(f"routing on http://{host}:{port} to {there}, {settings.policy}")
        await asyncio.Event().wait()
    finally:
        await running.cleanup()


async def _listen(running: web.AppRunner, settings: RouterSettings) -> None:
    site = web.TCPSite(running, settings.host, settings.port, backlog=BACKLOG)
    try:
        await site.start()
    except OSError as error:
        where = f"allowed: an address of this machine and a port that is free ({error.strerror})"
        raise ConfigError("--port", settings.port, where, "choose another one, or 0 for any") from None


def _stop_on_signals(server: Server) -> None:
    """Ctrl-C and SIGTERM end the service; a second one ends the requests that still run."""
    service, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert service is not None

    def stop() -> None:
        if service.cancelling():
            server.abort()
        else:
            service.cancel()

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop)
