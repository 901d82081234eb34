"""The scheduler as a real actor: killed, or stopped in its tracks, while turns wait there."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from nemo_war.generation.scheduling.actor import RayLink
from nemo_war.generation.scheduling.dispatcher import SharedDispatcher
from nemo_war.generation.scheduling.heartbeat import Patience
from nemo_war.metadata import TurnMetadata
from nemo_war.routing.facts import Books, Outcome, Placement, ReplicaFacts, TurnFacts, Waiting
from nemo_war.routing.least_outstanding import LeastOutstanding
from nemo_war.routing.policies import make
from nemo_war.routing.policy import Policy, in_flight

pytestmark = [pytest.mark.full, pytest.mark.asyncio]

PATIENCE = Patience(beat_s=0.2, deadline_s=1.0, restart_s=3.0)
REPLICAS = [ReplicaFacts(0, kv_tokens=10_000), ReplicaFacts(1, kv_tokens=10_000)]


class Windows(LeastOutstanding):
    """Lets two turns run on a replica, and the others wait for as long as it takes."""

    def choose(
        self, turn: Waiting, candidates: Sequence[ReplicaFacts], books: Books, now: float
    ) -> int | None:
        room = [facts for facts in candidates if in_flight(books, facts.replica) < 2]
        return super().choose(turn, room, books, now) if room else None


class Client:
    """One process that places turns, as far as the scheduler can tell."""

    def __init__(self, policy: Policy, name: str | None = None, patience: Patience = PATIENCE) -> None:
        self.link = RayLink(policy, name)
        self.on = SharedDispatcher(self.link, lambda: REPLICAS, time.monotonic, patience)

    def start(self, *names: str) -> list[asyncio.Task[Placement]]:
        turns = [TurnFacts(TurnMetadata(name, "g"), prompt_tokens=10, max_new_tokens=5) for name in names]
        return [asyncio.create_task(self.on.place(turn)) for turn in turns]

    def finish(self, *tasks: asyncio.Task[Placement]) -> None:
        for task in tasks:
            self.on.finish(task.result().ticket, Outcome(5, 0))
            self.on.end(task.result().trajectory)

    async def statistics(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.link.call("statistics"), 60)

    async def until(self, waiting: int, running: int) -> None:
        """The scheduler's books say so."""
        async with asyncio.timeout(30):
            while True:
                books = await self.statistics()
                if (books["waiting"], books["running"]) == (waiting, running):
                    return
                await asyncio.sleep(0.05)

    async def until_back(self) -> None:
        async with asyncio.timeout(60):
            while self.on.out:
                await asyncio.sleep(0.05)


async def gone(process: psutil.Process) -> None:
    """It goes by itself; Ray takes five seconds for one that stands still."""
    async with asyncio.timeout(30):
        while process.is_running():
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
async def test_turns_that_wait_go_on_without_it_and_later_ones_are_placed_by_its_next_life(
    signum: signal.Signals,
) -> None:
    client = Client(Windows())
    waiting = client.start(*(f"t{number}" for number in range(8)))
    await client.until(waiting=4, running=4)
    process = psutil.Process((await client.statistics())["process"])
    try:
        os.kill(process.pid, signum)
        began = time.monotonic()
        await asyncio.wait_for(asyncio.gather(*waiting), 10)
        noticed_s = time.monotonic() - began
        (new,) = client.start("new")
        await asyncio.wait_for(asyncio.shield(new), 1)
        outages = client.on.take_outages()
        assert (outages.fallbacks, outages.outages) == (5, 1), outages
        assert noticed_s < PATIENCE.beat_s + PATIENCE.deadline_s + 1, noticed_s
        await client.until_back()
        later = client.start("later", "last")
        await asyncio.gather(*later)
        assert client.on.take_outages().fallbacks == 0
        await client.until(waiting=0, running=2)
        assert (await client.statistics())["process"] != process.pid
        client.finish(*waiting, new, *later)
        await client.until(waiting=0, running=0)
        await gone(process)
    finally:
        if process.is_running():
            process.kill()
        await client.on.stop()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
async def test_several_clients_share_one_and_agree_on_the_next(signum: signal.Signals) -> None:
    name = f"scheduler-{signum}"
    clients = [Client(Windows(), name) for _ in range(3)]
    tasks = [client.start(f"a{number}", f"b{number}") for number, client in enumerate(clients)]
    await clients[0].until(waiting=2, running=4)
    processes = {(await client.statistics())["process"] for client in clients}
    assert len(processes) == 1
    (process,) = map(psutil.Process, processes)
    try:
        os.kill(process.pid, signum)
        await asyncio.wait_for(asyncio.gather(*(task for each in tasks for task in each)), 10)
        for client in clients:
            await client.until_back()
        after = {(await client.statistics())["process"] for client in clients}
        assert len(after) == 1
        assert after != processes
        later = [client.start(f"c{number}") for number, client in enumerate(clients)]
        await asyncio.gather(*(task for each in later for task in each))
        await clients[0].until(waiting=0, running=3)
        for client, first, second in zip(clients, tasks, later, strict=True):
            client.finish(*first, *second)
        await clients[0].until(waiting=0, running=0)
    finally:
        if process.is_running():
            process.kill()
        for client in clients:
            await client.on.stop()


async def test_thousands_of_turns_that_wait_there_are_no_hang() -> None:
    client = Client(Windows(), patience=Patience())
    tasks = client.start(*(f"t{number}" for number in range(3000)))
    await client.until(waiting=2996, running=4)
    await asyncio.sleep(2)
    assert client.on.take_outages().outages == 0
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    placed = [each for each in ended if isinstance(each, Placement)]
    assert len(placed) == 4
    for each in placed:
        client.on.finish(each.ticket, None)
    await client.until(waiting=0, running=0)
    assert client.on.take_outages().outages == 0
    process = psutil.Process((await client.statistics())["process"])
    await client.on.stop()
    await gone(process)


async def test_the_real_policy_starts_without_an_outage_and_places_in_milliseconds() -> None:
    client = Client(make("war"), patience=Patience())
    client.on.begin_step(4)
    (first,) = client.start("first")
    await first
    client.finish(first)
    took = []
    for number in range(50):
        began = time.perf_counter()
        (task,) = client.start(f"t{number}")
        await task
        took.append(time.perf_counter() - began)
        client.finish(task)
    await client.until(waiting=0, running=0)
    outages = client.on.take_outages()
    assert (outages.fallbacks, outages.outages) == (0, 0), outages
    assert sorted(took)[25] < 0.02, sorted(took)
    await client.on.stop()
