from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from nemo_war.metadata import TurnMetadata
from nemo_war.routing.dispatcher import Dispatcher
from nemo_war.routing.facts import Books, Outcome, Placement, ReplicaFacts, TurnFacts, Waiting
from nemo_war.routing.least_outstanding import LeastOutstanding
from nemo_war.routing.published import Published
from nemo_war.routing.scheduler import Scheduler


def turn(name: str) -> TurnFacts:
    return TurnFacts(TurnMetadata(name, "g"), prompt_tokens=10, max_new_tokens=5)


class Replicas:
    """Two replicas that may be closed to new work."""

    def __init__(self) -> None:
        self.open = True
        self.healthy = [True, True]

    def __call__(self) -> list[ReplicaFacts] | None:
        return [ReplicaFacts(n, each) for n, each in enumerate(self.healthy)] if self.open else None


def dispatcher(replicas: Replicas) -> Dispatcher:
    return Dispatcher(Scheduler(LeastOutstanding()), replicas, lambda: 0.0)


class Laborious(LeastOutstanding):
    """Takes 5 ms for a decision, and places nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.decisions = 0

    def order(self, waiting: Sequence[Waiting], now: float) -> Sequence[Waiting]:
        self.now += 0.005
        self.decisions += 1
        return ()


class Stumbling(LeastOutstanding):
    """Has a bug."""

    def choose(self, turn: Waiting, candidates: Sequence[ReplicaFacts], books: Books, now: float) -> int:
        if turn.turn.metadata.trajectory == "poison":
            raise KeyError("poison")
        return super().choose(turn, candidates, books, now)


async def soon() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_turn_goes_at_once_where_there_is_room() -> None:
    async def run() -> None:
        on = dispatcher(Replicas())
        first, second = await on.place(turn("a")), await on.place(turn("b"))
        assert {first.replica, second.replica} == {0, 1}

    asyncio.run(run())


def test_turns_wait_while_nothing_may_be_placed_and_go_in_order_afterwards() -> None:
    async def run() -> None:
        replicas = Replicas()
        on, went = dispatcher(replicas), []

        async def one(name: str) -> None:
            went.append((await on.place(turn(name))).trajectory)

        replicas.open = False
        tasks = [asyncio.create_task(one(name)) for name in "abc"]
        await soon()
        assert not went
        replicas.open = True
        on.pump()
        await asyncio.gather(*tasks)
        assert went == ["a", "b", "c"]

    asyncio.run(run())


def test_turns_wait_while_no_replica_is_left_and_time_alone_wakes_them() -> None:
    async def run() -> None:
        replicas = Replicas()
        on = dispatcher(replicas)
        replicas.healthy = [False, False]
        waiting = asyncio.create_task(on.place(turn("a")))
        await soon()
        assert not waiting.done()
        replicas.healthy = [False, True]
        assert (await waiting).replica == 1

    asyncio.run(run())


@pytest.mark.parametrize("placed_first", [False, True])
def test_a_cancelled_turn_leaves_nothing_behind(placed_first: bool) -> None:
    async def run() -> None:
        replicas = Replicas()
        on = dispatcher(replicas)
        replicas.open = False
        waiting = asyncio.create_task(on.place(turn("a")))
        await soon()
        replicas.open = True
        if placed_first:
            on.pump()  # placed, but its coroutine has not run yet
        waiting.cancel()
        if not placed_first:
            on.pump()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (on.scheduler.waiting, on.scheduler.running) == (0, 0)
        assert on.scheduler.check_integrity()

    asyncio.run(run())


def test_a_failure_reaches_all_who_wait() -> None:
    async def run() -> None:
        replicas = Replicas()
        on = dispatcher(replicas)
        replicas.open = False
        tasks = [asyncio.create_task(on.place(turn(name))) for name in "ab"]
        await soon()
        on.fail(RuntimeError("refit failed"))
        for task in tasks:
            with pytest.raises(RuntimeError, match="refit failed"):
                await task
        assert on.scheduler.waiting == 0

    asyncio.run(run())


def test_a_held_turn_goes_when_another_ends() -> None:
    async def run() -> None:
        on = Dispatcher(Scheduler(Published()), Replicas(), lambda: 0.0)
        placed: list[Placement] = []

        async def one(name: str) -> None:
            placed.append(await on.place(turn(name)))

        tasks = [asyncio.create_task(one(f"t{n}")) for n in range(40)]
        await soon()
        assert len(placed) == 32  # two windows of 16
        on.finish(placed[0].ticket, Outcome(1, 0))
        await soon()
        assert len(placed) == 33
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_deciding_takes_half_the_time_at_most_whoever_comes() -> None:
    async def run() -> None:
        policy = Laborious()
        on = Dispatcher(Scheduler(policy), Replicas(), lambda: policy.now)
        tasks = [asyncio.create_task(on.place(turn(f"t{n}"))) for n in range(1000)]
        await soon()
        assert policy.decisions == 1
        for _ in range(100):
            policy.now += 0.001  # what it takes to hear of something
            on.pump()
        assert policy.decisions == 100 // 5 + 1
        policy.now += 0.003
        asked = policy.decisions
        await asyncio.sleep(0.02)
        policy.now += 0.002
        await asyncio.sleep(0.02)
        assert policy.decisions == asked + 1, "it is asked after the pause, though nothing happens"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert on.scheduler.waiting == 0

    asyncio.run(run())


def test_a_policy_that_raises_fails_all_who_wait_and_holds_nothing() -> None:
    async def run() -> None:
        replicas = Replicas()
        on = Dispatcher(Scheduler(Stumbling()), replicas, lambda: 0.0)
        replicas.open = False
        tasks = [asyncio.create_task(on.place(turn(name))) for name in ("a", "poison", "b")]
        await soon()
        replicas.open = True
        on.pump()  # places a, then stumbles
        ticket, late = on.submit(turn("c"))  # comes while the other is still there
        assert isinstance(late.exception(), KeyError)
        on.withdraw(ticket)
        for task in tasks:
            with pytest.raises(KeyError, match="poison"):
                await task
        assert (on.scheduler.waiting, on.scheduler.running) == (0, 0)
        assert on.scheduler.check_integrity()
        assert (await on.place(turn("d"))).trajectory == "d"

    asyncio.run(run())


def test_a_turn_that_cannot_even_be_asked_for_holds_nothing() -> None:
    async def run() -> None:
        def replicas() -> list[ReplicaFacts]:
            raise RuntimeError("nobody knows them")

        on = Dispatcher(Scheduler(LeastOutstanding()), replicas, lambda: 0.0)
        with pytest.raises(RuntimeError, match="nobody knows"):
            await on.place(turn("a"))
        assert (on.scheduler.waiting, on.scheduler.running) == (0, 0)

    asyncio.run(run())
