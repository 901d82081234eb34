"""Clients that send whatever they like, and leave whenever they like."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import socket
import struct
from collections.abc import Callable

from mutation import NESTED, NUMBERS, TEXTS, changed, damaged, dumped

CHAT = {
    "model": "m", "stream": False, "max_tokens": 9, "max_completion_tokens": 9, "cache_salt": "s", "n": 1,
    "messages": [
        {"role": "system", "content": "You are."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url",
        "image_url": {"url": "u"}}]},
        {"role": "assistant", "content": "a", "prompt_token_ids": [*range(20)], "generation_token_ids": [1,
        2],
         "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "user", "content": "and?"},
    ],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "required_prefix_token_ids": [*range(18)],
    "session_id": "s1",
    "vllm_xargs": {"session_id": "s2", "war": {"trajectory": "t", "group": "g", "turn": 1, "epoch": 1,
    "remaining": 5}},
    "extra_args": {"war": {"trajectory": "t", "group": "g", "critical": True, "learn": False}},
}  # fmt: skip
_PLAIN = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
_COMPLETION = {"prompt": [*range(40)], "max_tokens": 5}
_TURNS = ("/v1/chat/completions", "/v1/completions")
_NO_LINGERING = struct.pack("ii", 1, 0)
_BOMBS = (gzip.compress(bytes(64 << 20), 1), gzip.compress(b"[" * NESTED), gzip.compress(b"{}") + b"x")
_SESSIONS = ("x-nemo-war-trajectory", "x-session-id", "x-smg-routing-key", "x-nemo-war-group")


class Attacker:
    """One connection to the router, and what is sent on it."""

    def __init__(self, chance: random.Random, host: str, port: int) -> None:
        self._chance, self._host, self._port = chance, host, port

    async def attack(self) -> None:
        """Send something, read some of what comes, and leave."""
        chance = self._chance
        make: Callable[[], bytes] = chance.choice(
            (self._turn, self._turn, self._turn, self._turn, self._broken, self._broken, self._odd, self._odd,
             self._oversized, self._pipelined, self._cut, self._other, self._random)
        )  # fmt: skip
        content = make()
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            return
        try:
            await self._send(writer, content)
            if chance.random() < 0.3 and writer.can_write_eof():
                writer.write_eof()
            if chance.random() < 0.8:
                async with asyncio.timeout(chance.choice((0.01, 0.1, 0.6))):
                    while await reader.read(1 << 16):
                        pass
        except (OSError, TimeoutError):
            pass
        finally:
            with contextlib.suppress(OSError, TimeoutError):
                if chance.random() < 0.3:  # so that closing resets the connection
                    writer.get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING
                    )
                writer.close()
                async with asyncio.timeout(1):
                    await writer.wait_closed()
            writer.transport.abort()

    async def _send(self, writer: asyncio.StreamWriter, content: bytes) -> None:
        if self._chance.random() < 0.8:
            writer.write(content)
            async with asyncio.timeout(1):
                await writer.drain()
            return
        for _ in range(4):  # slowly
            cut = self._chance.randrange(len(content) + 1)
            writer.write(content[:cut])
            content = content[cut:]
            await asyncio.sleep(0.02)
        writer.write(content)

    def _turn(self) -> bytes:
        """A request that is HTTP and JSON, and wrong."""
        chance = self._chance
        fields: object = chance.choice((CHAT, CHAT, _PLAIN, _COMPLETION))
        for _ in range(chance.choice((1, 1, 2, 5))):
            fields = changed(chance, fields)
        if isinstance(fields, dict) and chance.random() < 0.5:
            fields["stream"] = True
        return _request(chance.choice(_TURNS), dumped(chance, fields), self._sessions())

    def _sessions(self) -> bytes:
        chance, names = self._chance, b""
        while chance.random() < 0.3:
            name = chance.choice((*TEXTS, "s", "é")).encode(errors="surrogatepass").replace(b"\n", b"")
            names += (
                chance.choice(_SESSIONS).encode()
                + b": "
                + chance.choice((name, chance.randbytes(5)))
                + b"\r\n"
            )
        return names

    def _broken(self) -> bytes:
        content = _request(self._chance.choice(_TURNS), json.dumps(CHAT).encode())
        return damaged(self._chance, content, [content])

    def _odd(self) -> bytes:
        """Lines and headers that are seldom seen."""
        chance = self._chance
        method = chance.choice(
            (b"POST", b"GET", b"HEAD", b"CONNECT", b"OPTIONS", b"PRI", b"x" * 99, b"\0", b"DELETE")
        )
        target = chance.choice(
            (b"/v1/chat/completions", b"http://example.invalid/v1/chat/completions", b"//a/v1/completions",
            b"*",
             b"/v1/completions?" + b"a" * 9000, b"/%00%ff", b"/v1/models?%zz", b"example.invalid:80",
             b"/../../x",
             b"/v1/completions#@example.invalid/", b"/\xff\xfe", b"/trajectories/" + b"%2F" * 50,
             b"@b/v1/completions")
        )  # fmt: skip
        version = chance.choice((b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b""))
        headers = b"".join(
            chance.choice(
                (b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n",
                b"Content-Length: 5\r\n",
                 b"Content-Length: -1\r\n", b"Content-Length: %d\r\n" % abs(int(chance.choice(NUMBERS[:16]))),
                 b"Expect: 100-continue\r\n", b"Expect: nonsense\r\n",
                 b"Upgrade: websocket\r\nConnection: upgrade\r\n",
                 b"Content-Encoding: gzip\r\n", b"Content-Encoding: br\r\n", b"X: a\r\n b\r\n",
                 b"X\xff: \xff\r\n",
                 b"Connection: " + b"a," * 500 + b"\r\n", b": \r\n", b"X:\0\r\n", b"Host: \r\n",
                 b"Host: a\r\n" * 2,
                 b"X: " + b"x" * 20_000 + b"\r\n", b"X: 1\r\n" * 500, b"Cookie: \xff=;\r\n",
                 b"Range: bytes=0-\r\n",
                 b"Authorization: Bearer \xff\r\n")
            )
            for _ in range(chance.randrange(4))
        )  # fmt: skip
        body = chance.choice((b"{}{}{", b"5\r\n{}{}{\r\n0\r\n\r\n", b"0\r\n\r\n", b""))
        return method + b" " + target + b" " + version + b"\r\n" + headers + self._sessions() + b"\r\n" + body

    def _oversized(self) -> bytes:
        chance = self._chance
        body = chance.choice(
            (b"[" * NESTED, b'{"messages": ' + b'[{"content":' * NESTED, b" " * (3 << 20), b"1" * 100_000,
             b'{"prompt": [' + b"1," * 200_000 + b"1]}", b'{"messages": [' + b"{}," * 20_000 + b"{}]}")
        )  # fmt: skip
        if chance.random() < 0.3:
            return _request(_TURNS[0], chance.choice(_BOMBS), b"Content-Encoding: gzip\r\n")
        if chance.random() < 0.3:
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(body) // 4, body[: len(body) // 4]) for _ in range(4))
            return b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
        return _request(chance.choice(_TURNS), body)

    def _pipelined(self) -> bytes:
        return b"".join(
            self._chance.choice((self._turn, self._other, self._odd))()
            for _ in range(self._chance.randint(2, 8))
        )

    def _cut(self) -> bytes:
        content = self._turn()
        return content[: self._chance.randrange(len(content))]

    def _other(self) -> bytes:
        """What is no turn."""
        chance = self._chance
        path = chance.choice(
            ("/v1/models", "/tokenize", "/state", "/metrics", "/health", "/trajectories/t", "/x")
        )
        method = chance.choice(("GET", "POST", "DELETE")).encode()
        return _request(path, dumped(chance, _PLAIN), self._sessions(), method)

    def _random(self) -> bytes:
        return self._chance.randbytes(self._chance.choice((1, 100, 20_000)))


def _request(path: str, body: bytes, headers: bytes = b"", method: bytes = b"POST") -> bytes:
    head = b"%b %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n%b\r\n" % (
        method,
        path.encode(),
        len(body),
        headers,
    )
    return head + body
