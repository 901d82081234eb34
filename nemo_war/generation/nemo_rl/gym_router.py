"""The HTTP router in front of the workers' servers, as NeMo-RL's `GenerationRouter` would stand there.

NeMo-Gym is told one URL and keeps it, so that the router is an actor whose state is all made
in its constructor: one that Ray starts again is there again, at the same address.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import ray
from aiohttp import web

from nemo_war.config import PolicyName
from nemo_war.metadata import TurnMetadata
from nemo_war.routing.http.router import Router
from nemo_war.routing.http.server import BACKLOG, Server
from nemo_war.routing.http.settings import RouterSettings, base

_MOST_LEARNED = 65_536
"""Turns remembered until they are asked for, at the end of a step; the oldest go first."""
_TIMEOUT_S = 3600.0
"""Longest a whole answer may take where NeMo-RL names no bound."""


class Learned(NamedTuple):
    """A turn that was answered.

    Attributes:
        turn: whose it was.
        replica: that generated it.
        tokens: of its trajectory that this replica knows now.
    """

    turn: TurnMetadata
    replica: int
    tokens: int


class GymRouter:
    """NeMo-RL's router by interface: the same arguments, methods, paths and status codes."""

    def __init__(
        self,
        *,
        backend_urls: Sequence[str],
        host: str,
        port: int,
        backend_timeout_s: float = _TIMEOUT_S,
        connect_timeout_s: float = 5.0,
        no_healthy_backend_status: int = 409,
        outage_timeout_s: float = 10.0,
        health_managed: bool = False,
        policy: PolicyName = "war",
    ) -> None:
        """Listen, and route from now on.

        Args:
            backend_urls: of the workers' servers, with or without `/v1`.
            host: address to listen on; NeMo-RL's is the node's, as Gym's servers run on others too.
            port: to listen on.
            backend_timeout_s: longest an answer may take.
            connect_timeout_s: longest a connection may take.
            no_healthy_backend_status: told where no worker is there.
            outage_timeout_s: time given to a worker to come back before that is told.
            health_managed: taken for NeMo-RL's sake; the router looks at the workers' health by itself,
                and one that was lost comes back when it answers again.
            policy: where turns go.

        Raises:
            OSError: the port is taken.
        """
        settings = RouterSettings(
            tuple(backend_urls),
            host=host,
            port=port,
            policy=policy,
            profile="gym",
            no_replica_status=no_healthy_backend_status,
            outage_timeout_s=outage_timeout_s,
            read_timeout_s=backend_timeout_s,
            connect_timeout_s=connect_timeout_s,
        )
        self._learned: deque[Learned] = deque(maxlen=_MOST_LEARNED)
        self._router = Router(
            settings,
            lambda line: print(f"nemo_war: {line}", flush=True),
            lambda *learned: self._learned.append(Learned(*learned)),
        )
        self._numbers = {base(url): number for number, url in enumerate(backend_urls)}
        self._urls = list(backend_urls)
        self._told: Counter[str] = Counter()
        listener = socket.create_server((host, port), backlog=BACKLOG)
        self._url = f"http://{host}:{listener.getsockname()[1]}/v1"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=(listener,), name="gym-router", daemon=True)
        self._thread.start()

    def base_url(self) -> str:
        """What Gym is told; the same for as long as the job runs."""
        return self._url

    def set_serving_backends(self, urls: Sequence[str]) -> None:
        """From now on only these, of those that were known from the start, are given work."""
        numbers = [self._numbers[base(url)] for url in urls if base(url) in self._numbers]
        self._loop.call_soon_threadsafe(self._router.replicas.allow, numbers)

    def drain_backend_failures(self) -> dict[str, int]:
        """Failed requests by URL, since this was asked last."""
        failed = self._router.metrics
        now = Counter(
            {number: int(count) for number, count in failed.by_label(failed.failures, "replica").items()}
        )
        news, self._told = now - self._told, now
        return {self._urls[int(number)]: count for number, count in news.items()}

    def take_learned(self) -> list[Learned]:
        """What replicas learned since this was asked last, the oldest first."""
        return [self._learned.popleft() for _ in range(len(self._learned))]

    def metrics(self) -> dict[str, float]:
        """Counts since the start; names as NeMo-RL logs them."""
        metrics, settings = self._router.metrics, self._router.settings
        by_status = metrics.by_label(metrics.requests, "status")
        return {
            "router/requests_total": sum(by_status.values()),
            "router/no_healthy_backend_total": by_status.get(str(settings.no_replica_status), 0.0),
            "router/backend_error_total": sum(metrics.by_label(metrics.failures, "replica").values()),
            "router/serving_backends": float(len(self._router.replicas.healthy())),
        }

    def is_serving(self) -> bool:
        """Whether it listens."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Serve nobody any more."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self, listener: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        runner = Server(self._router).runner()
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.SockSite(runner, listener).start())
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())


GymRouterActor = ray.remote(num_cpus=1, num_gpus=0, max_restarts=-1)(GymRouter)
"""With the same resources as NeMo-RL's."""
