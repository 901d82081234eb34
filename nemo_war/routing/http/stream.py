"""The client's side of a streamed answer: whole lines only, so that it can be ended at any time.

Until the first byte nothing is sent, and the request can be given to another replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web
from multidict import CIMultiDict


class ClientGoneError(Exception):
    """The client's connection is closed; there is nobody to answer."""


class EventStream:
    """A stream of server-sent events on its way to the client."""

    def __init__(self, request: web.Request, status: int, headers: CIMultiDict[str]) -> None:
        self.response = web.StreamResponse(status=status, headers=headers)
        self._request = request
        self._rest = bytearray()  # so that a line that comes in many chunks is not copied with each

    @property
    def started(self) -> bool:
        """Whether the client has seen any of it."""
        return self.response.prepared

    def lines(self, chunk: bytes) -> bytes:
        """All lines that are whole with this chunk; the rest is kept for the next one."""
        end = chunk.rfind(b"\n") + 1
        if not end:
            self._rest += chunk
            return b""
        lines, self._rest = bytes(self._rest) + chunk[:end], bytearray(chunk[end:])
        return lines

    async def send(self, lines: bytes) -> None:
        """Send whole lines, if any."""
        with _client():
            if lines and not self.response.prepared:
                await self.response.prepare(self._request)
            if lines:
                await self.response.write(lines)

    async def close(self) -> None:
        """End the stream where its replica ended it."""
        await self.send(bytes(self._rest))
        await self._end()

    async def abort(self, last: bytes) -> None:
        """End the stream with `last`, in place of what is missing."""
        await self.send(b"\n" + last)  # the empty line ends an event that its replica did not
        await self._end()

    async def _end(self) -> None:
        with _client():
            if not self.response.prepared:
                await self.response.prepare(self._request)
            await self.response.write_eof()


@contextmanager
def _client() -> Iterator[None]:
    """Tell failures of the client's connection from those of a replica's."""
    try:
        yield
    except ConnectionError as error:
        raise ClientGoneError(str(error)) from error
