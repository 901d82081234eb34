"""Requests of the HTTP server in a worker, which say in a header whose turn they are.

The router in front of the servers knows that, and vLLM's server would not pass it on. What
is answered says under which policy epoch it was generated, by which the router knows of
refits that nobody tells it of.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from nemo_war.generation.nemo_rl.call import CALL, Call
from nemo_war.metadata import TurnMetadata
from nemo_war.routing.http.identity import EPOCH_HEADER, TURN_HEADER, read_turn

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


def install(app: Any, engine: Any) -> None:
    """Have a worker's server read and say that, and answer what a router asks of a replica.

    Args:
        app: FastAPI application.
        engine: the `AsyncLLM` behind it.
    """
    from fastapi import Response
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    app.add_middleware(HttpTurns)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=503 if engine.errored else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


class HttpTurns:
    """ASGI middleware."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        """Pass all on to this application."""
        self._app = app

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        turn = _turn(scope["headers"])
        call = Call([turn] if turn else None)
        CALL.set(call)

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start" and call.served:
                epoch = str(call.served[-1].ended).encode()
                message["headers"] = [*message.get("headers", ()), (EPOCH_HEADER.encode(), epoch)]
            await send(message)

        await self._app(scope, receive, tell)


def _turn(headers: list[tuple[bytes, bytes]]) -> TurnMetadata | None:
    """What the request's header says; None where it says nothing, or what makes no sense."""
    for name, value in headers:
        if name == TURN_HEADER.encode():
            return read_turn(value.decode("latin-1"))
    return None
