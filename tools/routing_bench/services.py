"""Processes that answer over HTTP, each with what it takes to start it again."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

_ROOT = Path(__file__).parents[2]
_START_S = 60.0
_STOP_S = 10.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Service:
    """One process.

    Attributes:
        command: starts it.
        url: where it listens.
        path: answered once it can be used.
        log: file for what it says.
    """

    command: Sequence[str]
    url: str
    path: str
    log: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Start it, for the first time or again; it is not ready yet."""
        environment = os.environ | {"PYTHONPATH": str(_ROOT)}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment)

    async def ready(self) -> None:
        """Wait until it answers.

        Raises:
            TimeoutError: it does not.
        """
        async with asyncio.timeout(_START_S), aiohttp.ClientSession() as client:
            while not await self._answers(client):
                await asyncio.sleep(0.05)

    def kill(self) -> None:
        """End it as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ask it to end, and see to it."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def cpu_s(self) -> float:
        """Time that its threads have run so far."""
        assert self._process is not None
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / _TICKS

    async def _answers(self, client: aiohttp.ClientSession) -> bool:
        try:
            async with client.get(self.url + self.path) as response:
                return response.status < 500
        except aiohttp.ClientError:
            return False


@asynccontextmanager
async def running(services: Sequence[Service]) -> AsyncIterator[None]:
    """All of them answer; nothing is left behind."""
    try:
        for service in services:
            service.start()
        for service in services:
            await service.ready()
        yield
    finally:
        for service in services:
            service.stop()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
