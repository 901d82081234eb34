"""A replica that answers whatever it likes, and once it is told to behave, as it should."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections.abc import Awaitable, Callable

from mutation import TEXTS, changed, damaged, value

GOOD = {
    "choices": [
        {
            "index": 0, "text": "hi", "token_ids": [1, 2], "prompt_token_ids": [*range(40)],
            "message": {
                "role": "assistant", "content": "hi", "prompt_token_ids": [*range(20)],
                "generation_token_ids": [5, 6],
                "tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}],
            },
            "delta": {"content": "hi", "tool_calls": [{"index": 1, "function": {"arguments": "{"}}]},
        }
    ],
    "prompt_token_ids": [*range(30)],
    "usage": {"prompt_tokens": 40, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 16}},
    "error": {"message": "no", "code": 503},
}  # fmt: skip
METRICS = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
_STATUSES = (
    0,
    99,
    100,
    101,
    103,
    199,
    200,
    204,
    206,
    301,
    304,
    400,
    404,
    408,
    429,
    500,
    502,
    503,
    520,
    600,
    999,
)
_NO_LINGERING = struct.pack("ii", 1, 0)

Writing = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Impostor:
    """Listens on a free port of 127.0.0.1.

    Attributes:
        port: where.
        hostile: whether it does what it likes.
    """

    def __init__(self) -> None:
        self.port, self.hostile = 0, False
        self._chance = random.Random(0)
        self._connections: dict[asyncio.StreamWriter, asyncio.Task | None] = {}

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        self.behave()
        while self._connections:
            await asyncio.sleep(0.01)

    def begin(self, seed: int, hostile: bool) -> None:
        self.hostile, self._chance = hostile, random.Random(seed)

    def behave(self) -> None:
        """From now on; what it is in the midst of is broken off."""
        self.hostile = False
        for writer, task in self._connections.items():
            writer.transport.abort()
            if task is not None:
                task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[writer] = asyncio.current_task()
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length:")[2].partition(b"\r")[0]
                body = await reader.readexactly(int(length or 0))
                if self.hostile and self._chance.random() < 0.8:
                    await self._misbehave(head, reader, writer)
                else:
                    await _answer(head, body, writer)
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            del self._connections[writer]
            writer.transport.abort()

    async def _misbehave(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        chance = self._chance
        if head.startswith((b"GET /health", b"GET /metrics")) and chance.random() < 0.5:
            writer.write(_whole(200, "text/plain", _metrics(chance)))
            return
        act = chance.choice(
            (self._random, self._odd, self._miscounted, self._chunked, self._endless, self._events,
            self._events,
             self._changed, self._changed, self._silent, self._reset, self._slow, self._doubled)
        )  # fmt: skip
        await act(reader, writer)

    async def _random(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._chance.randbytes(self._chance.choice((1, 30, 5000))))
        await self._flush_and_close(writer)

    async def _odd(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A status, headers or a first line that are seldom seen."""
        chance = self._chance
        status, body = chance.choice(_STATUSES), json.dumps(GOOD).encode()
        headers = b"".join(
            chance.choice(
                (b"X-A", b"Set-Cookie", b"Content-Type", b"Content-Encoding", b"Location", b"\xff", b"")
            )
            + chance.choice((b": ", b":", b" : ", b""))
            + chance.choice(
                (chance.randbytes(9), b"gzip", b"a\r\n b", b"text/event-stream; q", b"\xfc\xff", b"x/y/z;=")
            )
            + b"\r\n"
            for _ in range(chance.choice((1, 2, 300)))
        )
        first = chance.choice(
            (b"HTTP/1.1 %03d OK", b"HTTP/1.0 %d", b"HTTP/1.1 %03d \xff\x1b[2J", b"ICY %d", b"HTTP/9.9 %d")
        )
        writer.write(first % status + b"\r\n" + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await self._flush_and_close(writer)

    async def _miscounted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = self._chance.choice((b"0", b"-1", b"5", b"999999", b"9" * 30, b"1, 2", b"0x10", b" ", b"+3"))
        kind = self._chance.choice((b"application/json", b"text/event-stream"))
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %b\r\n\r\n{}{}{}" % (kind, length)
        )
        await self._flush_and_close(writer)

    async def _chunked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind = self._chance.choice((b"application/json", b"text/event-stream"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n" % kind)
        for _ in range(self._chance.randrange(5)):
            size = self._chance.choice(
                (b"2", b"-2", b"FFFFFFFFFFFFFFFFF", b"2;" + b"x" * 9000, b"0", b"zz", b"")
            )
            writer.write(size + self._chance.choice((b"\r\n", b"\n")) + b"{}\r\n")
        await self._flush_and_close(writer)

    async def _endless(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the connection is closed."""
        start, piece = self._chance.choice(
            (
                (b"HTTP/1.1 200 OK\r\n", b"X-Header: 1\r\n" * 50),
                (b"HTTP/1.1 200 OK\r\nX-A: ", b"a" * 4096),
                (b"HTTP/1.1 200 ", b"a" * 4096),
                (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n", b" " * 65536),
                (b"HTTP/1.1 500 No\r\n\r\n", b"x" * 65536),
                (
                    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
                    b"4000\r\n" + b"1" * 16384 + b"\r\n",
                ),
                (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", b"data: " * 9000),
                (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", b"\n" * 9000),
                (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", _event(GOOD) * 20),
                (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n" * 50),
            )
        )
        writer.write(start)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    async def _events(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        chance = self._chance
        events = [_event(changed(chance, GOOD)) for _ in range(chance.randrange(6))]
        events.insert(chance.randrange(len(events) + 1), b"data: [DONE]\n\n")
        text = b"".join(events)
        if chance.random() < 0.4:
            text = damaged(chance, text, [text])
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        while text:
            cut = chance.choice((1, 100, len(text)))
            writer.write(text[:cut])
            text = text[cut:] if chance.random() < 0.9 else b""
            await writer.drain()
        await self._flush_and_close(writer)

    async def _changed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """An answer that is JSON, and wrong."""
        chance, answer = self._chance, {name: field for name, field in GOOD.items() if name != "error"}
        for _ in range(chance.choice((1, 1, 3))):
            answer = changed(chance, answer)
        writer.write(_whole(chance.choice((200, 200, 200, 400, 500)), "application/json", json.dumps(answer)))

    async def _silent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._chance.random() < 0.5:
            writer.write(b"HTTP/1.1 200 OK\r\n")
        await reader.read()

    async def _reset(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {}\n\n"[
                : self._chance.randrange(80)
            ]
        )
        await asyncio.sleep(0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
        raise ConnectionResetError

    async def _slow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in _whole(200, "application/json", json.dumps(GOOD))[:20]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.01)
        raise ConnectionResetError

    async def _doubled(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """More answers than there were requests."""
        answer = _whole(200, "application/json", json.dumps(GOOD))
        writer.write(answer + self._chance.choice((answer, b"garbage", b"HTTP/1.1 500 No\r\n\r\n")))

    async def _flush_and_close(self, writer: asyncio.StreamWriter) -> None:
        if self._chance.random() < 0.8:
            await writer.drain()
            writer.write_eof()
            await asyncio.sleep(0.01)
            raise ConnectionResetError


def _whole(status: int, kind: str, text: str) -> bytes:
    body = text.encode(errors="surrogatepass")
    return (
        f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )


def _event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _metrics(chance: random.Random) -> str:
    """Metrics of an engine, or what looks like them."""
    numbers = [chance.choice((*TEXTS, "16", str(value(chance, 0)), "٣", "1_0")) for _ in range(2)]
    text = f'vllm:cache_config_info{{block_size="{numbers[0]}",num_gpu_blocks="{numbers[1]}"}} 1.0\n'
    content = (text * chance.choice((1, 2, 50))).encode(errors="surrogatepass")
    return (damaged(chance, content, [content]) if chance.random() < 0.7 else content).decode(
        errors="replace"
    )


async def _answer(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
    """As a good replica: what it was asked comes back."""
    if head.startswith(b"GET /metrics"):
        writer.write(_whole(200, "text/plain", METRICS))
        return
    asked = ""
    with contextlib.suppress(ValueError, KeyError, TypeError, IndexError, RecursionError):
        asked = str(json.loads(body)["messages"][-1]["content"])
    answer = {"choices": [{"index": 0, "message": {"role": "assistant", "content": f"heard {asked}"}}]}
    writer.write(_whole(200, "application/json", json.dumps(answer)))
    await writer.drain()
