"""Whatever clients and replicas send: the router goes on, says no error of its own, and keeps none of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web
from attacker import Attacker
from budget import BUDGETS, replayable, seeds
from impostor import Impostor

from nemo_war.routing.http.router import Router
from nemo_war.routing.http.server import Server
from nemo_war.routing.http.settings import POLICIES, RouterSettings

AT_ONCE = 48
"""Attacks of a case."""
CASES = 16
"""Cases that a router lives through; the next one has another policy."""
LONGEST_S = 240.0
"""Of a case, which takes less than a second of an idle machine: one that hangs is to say its seed."""
MOST_MIB = 300
"""Growth of the process after its first routers, which import and cache things."""
MOST_DESCRIPTORS = 30
WARM_UP, TRIES = 3, 20
TIGHT: dict[str, Any] = {
    "max_body_mib": 1, "max_answer_mib": 1, "max_waiting": 40, "max_trajectories": 50, "idle_s": 0.5,
    "wait_timeout_s": 1.0, "outage_timeout_s": 0.2, "read_timeout_s": 0.3, "connect_timeout_s": 1.0,
    "health_interval_s": 0.03, "health_timeout_s": 0.2, "patience_s": 0.3, "grace_s": 0.5,
}  # fmt: skip


class Place:
    """A router between attackers and impostors."""

    def __init__(self, router: Router, address: tuple[str, int], impostors: list[Impostor]) -> None:
        self.router, self.address, self.impostors = router, address, impostors

    async def case(self, seed: int) -> None:
        """Attack from both sides, then see that all is well."""
        with replayable(seed) as chance:
            async with asyncio.timeout(LONGEST_S):
                await self._attack(seed, chance)

    async def _attack(self, seed: int, chance: random.Random) -> None:
        for impostor in self.impostors:
            impostor.begin(chance.getrandbits(32), hostile=chance.random() < 0.7)
        await asyncio.gather(*(Attacker(chance, *self.address).attack() for _ in range(AT_ONCE)))
        for impostor in self.impostors:
            impostor.behave()
        await self._calm()
        await self._serves(f"case {seed}")
        await self._calm()

    async def _calm(self) -> None:
        scheduler, trajectories = self.router.queue.scheduler, self.router.trajectories
        await until(lambda: not scheduler.waiting and not scheduler.running, "turns are left over")
        await until(lambda: not trajectories.active, "trajectories are left over")
        await until(
            lambda: len(self.router.replicas.healthy()) == len(self.impostors), "a replica stays lost"
        )
        assert scheduler.check_integrity()
        assert trajectories.check_integrity()
        assert len(trajectories) <= TIGHT["max_trajectories"]

    async def _serves(self, text: str) -> None:
        """A good request is: at once, but for a machine so busy that one of the tight limits passes."""
        url = f"http://{self.address[0]}:{self.address[1]}/v1/chat/completions"
        body, told = {"messages": [{"role": "user", "content": text}]}, []
        for _ in range(TRIES):
            async with aiohttp.ClientSession() as client, client.post(url, json=body) as response:
                told.append(await response.json())
                if response.status == 200:
                    break
        assert told[-1].get("choices", [{}])[0].get("message", {}).get("content") == f"heard {text}", told


async def until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, otherwise
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def attacked(seed: int) -> AsyncIterator[Place]:
    impostors = [Impostor() for _ in range(3)]
    for impostor in impostors:
        await impostor.start()
    urls = tuple(f"http://127.0.0.1:{impostor.port}" for impostor in impostors)
    policy = POLICIES[seed // CASES % len(POLICIES)]
    profile = ("openai", "gym")[seed // CASES % 2]
    router = Router(RouterSettings(urls, policy=policy, profile=profile, **TIGHT), lambda line: None)
    running = Server(router).runner()
    await running.setup()
    await web.TCPSite(running, "127.0.0.1", 0).start()
    try:
        yield Place(router, running.addresses[0][:2], impostors)
    finally:
        async with asyncio.timeout(LONGEST_S):
            await running.cleanup()
            for impostor in impostors:
                await impostor.stop()


@BUDGETS
async def test_the_router_outlives_hostile_clients_and_replicas(
    seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context))
    before, held, lives = used(), 0, 0
    stream = seeds(seconds)
    while (seed := next(stream, None)) is not None:
        async with attacked(seed) as place:
            for _ in range(CASES):
                await place.case(seed)
                assert not caplog.records, f"seed {seed}: {caplog.text[-3000:]}"
                assert not unheard, f"seed {seed}: {unheard}"
                if (seed := next(stream, None)) is None:
                    break
        lives += 1
        if lives == WARM_UP:
            before = used()
        held = max(held, used()[0])
    after = used()
    assert after[1] <= before[1] + MOST_DESCRIPTORS, "descriptors leak"
    assert after[0] <= before[0] + MOST_MIB, "memory leaks"
    print(f"{AT_ONCE} attacks a case; {before} MiB and descriptors before, {after} after, {held} MiB at most")


def used() -> tuple[int, int]:
    """MiB and descriptors of this process."""
    gc.collect()
    return psutil.Process().memory_info().rss >> 20, len(os.listdir("/proc/self/fd"))
