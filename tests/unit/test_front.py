"""The front: turns from any thread, placed by a scheduler elsewhere, of replicas that tell of refits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nemo_war.config import WarConfig
from nemo_war.generation.nemo_rl import front
from nemo_war.generation.nemo_rl.front import Front
from nemo_war.metadata import TurnMetadata
from nemo_war.routing.facts import ReplicaFacts
from nemo_war.routing.policies import make
from tests.unit.fake_link import FakeLink


class FakeReplicas:
    """Two replicas that answer what a worker would."""

    size = 2

    def __init__(self) -> None:
        self.epochs = [0, 0]
        self.calls: list[tuple[int, str]] = []
        self.learned: list[int] = []

    async def ask(self, number: int, method: str, *arguments: Any) -> Any:
        self.calls.append((number, method))
        if method == "epoch":
            return self.epochs[number]
        if method == "export_history":
            return np.zeros(8, np.uint8)
        if method == "import_history":
            self.learned.append(number)
        return None


class Bed:
    """A front, its replicas, and which of them may be given work."""

    def __init__(self, **war: Any) -> None:
        self.replicas = FakeReplicas()
        self.facts = [ReplicaFacts(0, kv_tokens=10_000), ReplicaFacts(1, kv_tokens=10_000)]
        self.links: list[FakeLink] = []
        self.front = Front(
            WarConfig(**war), self.replicas, lambda: self.facts, self._connect, lambda blob: blob
        )

    def _connect(self) -> FakeLink:
        self.links.append(FakeLink(lambda: make("war"), time.monotonic))
        return self.links[0]

    def turn(self, prompt: np.ndarray, answer: int = 20) -> Any:
        """One turn in an event loop of its own, answered with this many tokens."""

        async def one() -> Any:
            async with self.front.turn(prompt, 64) as turn:
                turn.answer = np.append(prompt, np.arange(answer, dtype=np.int32))
                turn.generated = answer
                return turn

        return asyncio.run(one())

    def settle(self, condition: Callable[[], bool]) -> None:
        """Wait until that is so."""
        until = threading.Event()
        for _ in range(200):
            if condition():
                return
            until.wait(0.02)
        raise AssertionError("it never came to that")

    @property
    def statistics(self) -> dict[str, Any]:
        scheduler = self.links[0].scheduler
        assert scheduler is not None
        return asyncio.run(scheduler.statistics())


@pytest.fixture
def bed() -> Iterator[Bed]:
    made = Bed()
    yield made
    made.front.stop()


def prompt(seed: int, length: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, length, dtype=np.int32)


def test_a_trajectory_goes_on_where_it_was_under_its_name(bed: Bed) -> None:
    first = bed.turn(prompt(0))
    others = [bed.turn(prompt(seed)) for seed in range(1, 6)]
    second = bed.turn(np.append(first.answer, prompt(9, 8)))
    assert second.metadata.trajectory == first.metadata.trajectory
    assert (first.metadata.turn, second.metadata.turn) == (0, 1)
    assert second.replica == first.replica
    assert {turn.replica for turn in others} == {0, 1}


def test_siblings_share_a_group_and_nothing_else(bed: Bed) -> None:
    one, other = bed.turn(prompt(0)), bed.turn(prompt(0))
    assert one.metadata.group == other.metadata.group
    assert one.metadata.trajectory != other.metadata.trajectory


def test_threads_with_loops_of_their_own_are_served_at_once(bed: Bed) -> None:
    turns: list[Any] = []
    threads = [threading.Thread(target=lambda n=n: turns.append(bed.turn(prompt(n)))) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({turn.metadata.trajectory for turn in turns}) == 12
    bed.settle(lambda: bed.statistics["running"] == 0)


def test_a_turn_that_fails_or_is_cancelled_gives_its_place_back(bed: Bed) -> None:
    async def failing() -> None:
        async with bed.front.turn(prompt(0), 64):
            raise OSError("the worker died")

    with pytest.raises(OSError, match="the worker died"):
        asyncio.run(failing())

    async def cancelled() -> None:
        async with bed.front.turn(prompt(1), 64):
            await asyncio.sleep(60)

    async def cancelling() -> None:
        tasks = [asyncio.create_task(cancelled()) for _ in range(20)]
        for delay, task in enumerate(tasks):  # some before their placement, some behind it
            await asyncio.sleep(delay / 5000)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(cancelling())
    bed.settle(lambda: bed.statistics["running"] == bed.statistics["waiting"] == 0)


def test_a_turn_that_is_cancelled_at_the_moment_it_was_placed_gives_its_place_back(bed: Bed) -> None:
    async def cancelled() -> None:
        async with bed.front.turn(prompt(0), 64):
            pass

    async def cancelling() -> None:
        task = asyncio.create_task(cancelled())
        await asyncio.sleep(0)
        bed.settle(lambda: bool(bed.front._dispatcher._placed))  # this loop stands still, and is not told
        threading.Event().wait(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelling())
    bed.settle(lambda: not bed.front._dispatcher._placed)


def test_where_no_replica_is_left_nemo_rl_is_to_say_so(bed: Bed) -> None:
    bed.turn(prompt(0))
    bed.facts = [replace(facts, healthy=False) for facts in bed.facts]
    assert bed.turn(prompt(1)).replica is None


def test_a_replica_that_is_out_of_service_is_given_nothing(bed: Bed) -> None:
    bed.facts = [bed.facts[0], replace(bed.facts[1], healthy=False)]
    assert {bed.turn(prompt(seed)).replica for seed in range(4)} == {0}


def test_a_turn_that_waits_when_all_is_shut_down_has_an_error() -> None:
    bed = Bed()
    bed.turn(prompt(0))
    bed.front._loop.call_soon_threadsafe(bed.links[0].freeze)
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            bed.turn(prompt(1))
        except RuntimeError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    threading.Event().wait(0.3)
    bed.front.stop()
    waiting.join(timeout=5)
    assert [str(error) for error in failures] == ["the generation was shut down"]


def test_after_a_failure_turns_go_elsewhere_while_there_is_another_replica(bed: Bed) -> None:
    bed.turn(prompt(0))
    bed.front.failed(0)
    assert {bed.turn(prompt(seed)).replica for seed in range(1, 5)} == {1}
    bed.front.failed(1)
    assert bed.turn(prompt(9)).replica is not None


def test_a_scheduler_that_does_not_answer_costs_speed_only(bed: Bed) -> None:
    bed.turn(prompt(0))
    bed.front._loop.call_soon_threadsafe(bed.links[0].freeze)
    assert bed.turn(prompt(1)).replica in (0, 1)


def test_the_first_turn_after_a_pause_finds_out_about_a_refit(bed: Bed) -> None:
    bed.turn(prompt(0))
    bed.replicas.epochs = [1, 1]
    bed.turn(prompt(1))
    assert bed.front._epoch == 1


def test_replicas_that_do_not_say_their_epoch_in_time_keep_nobody_waiting(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(number: int, method: str, *arguments: Any) -> Any:
        await asyncio.sleep(3600)

    monkeypatch.setattr(front, "_LOOK_S", 0.1)
    monkeypatch.setattr(bed.replicas, "ask", silent)
    assert bed.turn(prompt(0)).replica in (0, 1)


def test_a_refit_with_turns_under_way_is_heard_of_from_answers(bed: Bed) -> None:
    bed.turn(prompt(0))
    bed.front.saw(3)
    bed.settle(lambda: bed.front._epoch == 3)


def test_histories_are_exchanged_in_a_pause(bed: Bed) -> None:
    turn = bed.turn(prompt(0))
    bed.settle(lambda: bed.replicas.learned == [1 - turn.replica])


def test_what_came_by_http_is_exchanged_too(bed: Bed) -> None:
    bed.front.learned([(TurnMetadata("t", "g"), 1, 100)])
    bed.settle(lambda: bed.replicas.learned == [0])


def test_validation_is_not_shared_and_says_so(bed: Bed) -> None:
    bed.front.learning = False
    assert not bed.turn(prompt(0)).metadata.learn
    threading.Event().wait(0.8)
    assert not bed.replicas.learned


def test_arms_of_an_in_job_comparison_follow_the_policy_epoch() -> None:
    bed = Bed(ab_every=2)
    try:
        placed = []
        for epoch in range(6):
            bed.replicas.epochs = [epoch, epoch]
            placed.append(bed.turn(prompt(epoch)).replica is not None)
        assert placed == [True, True, False, False, True, True]
    finally:
        bed.front.stop()


def test_a_batch_has_turns_in_its_order_and_remembers_where_they_went(bed: Bed) -> None:
    prompts = [prompt(seed) for seed in range(4)]
    with bed.front.batch(prompts) as turns:
        for number, turn in enumerate(turns):
            turn.replica, turn.answer = number % 2, np.append(prompts[number], prompt(50 + number, 20))
    homes = [bed.front.turns.home(turn.metadata.trajectory) for turn in turns]
    assert homes == [0, 1, 0, 1]


def test_one_that_is_stopped_in_a_pause_begins_no_exchange() -> None:
    bed = Bed()
    bed.turn(prompt(0))
    bed.front.stop()
    assert bed.front._pause is not None
    assert bed.front._pause.cancelled()
