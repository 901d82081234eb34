"""Replicas that answer at once: `python -m tools.routing_bench.instant PORT...`, all in one process.

A bare protocol, as a web framework would take longer for a request than a router does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence

from nemo_war.simulation.server import MODEL

_CHOICE = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "1"}}
_ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 0,
    "model": MODEL,
    "choices": [_CHOICE],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "nemo-war"}]}


def _response(content: object) -> bytes:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


_TO_POST, _TO_GET = _response(_ANSWER), _response(_MODELS)


class Instant(asyncio.Protocol):
    """One connection; bodies are counted and not read."""

    def __init__(self) -> None:
        self._head = b""
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer when a whole request is there; clients send the next one after the answer."""
        if self._missing:
            self._missing -= len(data)
        else:
            self._head += data
            head, end, body = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._get = head.startswith(b"GET")
            self._head, self._missing = b"", _length(head) - len(body)
        if self._missing <= 0:
            self._missing = 0
            self._transport.write(_TO_GET if self._get else _TO_POST)


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


async def serve(ports: Sequence[int]) -> None:
    """Listen until cancelled."""
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(Instant, "127.0.0.1", port)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser("tools.routing_bench.instant", description=__doc__)
    parser.add_argument("ports", nargs="+", type=int)
    asyncio.run(serve(parser.parse_args().ports))


if __name__ == "__main__":
    main()
