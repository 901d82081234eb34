"""A replica that speaks vLLM's HTTP interface and generates what it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

HEAD = {"id": "1", "object": "made.up", "model": "m", "created": 1}


class FakeReplica:
    """Serves on a free port of 127.0.0.1; `kill` and `start` it as often as needed.

    Attributes:
        served: (path, headers, fields) of all requests that arrived.
        gate: answers wait for it.
        reply: text of an answer, from the request's fields.
        status: of the answers.
        pieces: events of a stream; after `break_after` of them the connection breaks.
        fail_after: so many events, and the engine dies: an error takes the place of the others.
        metrics: text of its /metrics; None and there are none.
        linger_s: time between a stream's last event and its end.
        tokens: whether answers carry token ids as NeMo-RL's replicas tell them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0
        self.served: list[tuple[str, Any, dict]] = []
        self.running = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.reply: Callable[[dict], str] = lambda fields: f"{self.name} answers {len(self.served)}"
        self.status, self.health = 200, 200
        self.pieces, self.break_after, self.fail_after = 5, 10**9, 10**9
        self.tokens = False
        self.metrics: str | None = None
        self.linger_s = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        application = web.Application(client_max_size=2**28)
        application.router.add_get("/health", self._health)
        application.router.add_get("/metrics", self._metrics)
        application.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(
            application, access_log=None, handler_cancellation=True, shutdown_timeout=0.01
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """Refuse connections and reset those there are, as the kernel does for a process that is gone."""
        if self._runner.server is None:
            return  # it is gone already
        for connection in list(self._runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics or "", status=404 if self.metrics is None else 200)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        fields = json.loads(await request.read() or "{}")
        self.served.append((request.path, request.headers, fields))
        self.running += 1
        try:
            await self.gate.wait()
            if fields.get("stream"):
                return await self._stream(request, fields)
            return web.json_response(
                self._answer(fields), status=self.status, headers={"x-served-by": self.name}
            )
        finally:
            self.running -= 1

    def _answer(self, fields: dict) -> dict:
        if self.status != 200:
            return {"error": {"message": f"{self.name} says no", "type": "made_up", "code": self.status}}
        text = self.reply(fields)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.tokens:
            message |= {"prompt_token_ids": list(range(40)), "generation_token_ids": list(text.encode())}
        usage = {"prompt_tokens": 40, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 16}}
        choice = {"index": 0, "message": message, "text": text, "finish_reason": "stop"}
        return {**HEAD, "choices": [choice], "usage": usage}

    async def _stream(self, request: web.Request, fields: dict) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "x-served-by": self.name}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        for number in range(self.pieces):
            if number == self.break_after:
                await response.write(b'data: {"choices": [{"del')
                request.transport.abort()
                return response
            if number == self.fail_after:
                await response.write(b'data: {"error": {"message": "engine died", "code": 500}}\n\n')
                break
            delta = {"role": "assistant", "content": f"{self.name}{number} "}
            chunk = {**HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await asyncio.sleep(0.001)
            await self.gate.wait()
        await response.write(b"data: [DONE]\n\n")
        await asyncio.sleep(self.linger_s)
        return response
