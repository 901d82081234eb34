from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from nemo_war.config import StepTimePrior
from nemo_war.generation.step_time import StepTimeModel
from nemo_war.metadata import TurnMetadata
from nemo_war.routing import progress, siblings
from nemo_war.routing.facts import Outcome, Placement, ReplicaFacts, TurnFacts
from nemo_war.routing.options import Options, Weights
from nemo_war.routing.scheduler import Scheduler
from nemo_war.routing.sticky import Sticky
from nemo_war.routing.workload_aware import WorkloadAware

STEP_TIME = StepTimeModel(StepTimePrior(base=20, per_request=0.1, per_token=0.1, per_kilotoken=0))


def replicas(count: int = 2, kv_tokens: int = 0, **healthy: bool) -> list[ReplicaFacts]:
    return [ReplicaFacts(n, healthy.get(f"r{n}", True), kv_tokens, STEP_TIME) for n in range(count)]


class Driver:
    """Turns of trajectories whose prompts grow, each answered in full before the next."""

    def __init__(self, options: Options | None = None, seed: int = 0) -> None:
        self.scheduler = Scheduler(WorkloadAware(options, seed))
        self.contexts: dict[str, np.ndarray] = {}
        self.turns: dict[str, int] = {}
        self.now = 0.0

    def submit(
        self, name: str, tokens: int, group: str = "g", epoch: int = 0, *, prompts: bool = True
    ) -> None:
        before = self.contexts.get(name, np.full(256, len(group), dtype=np.int32))
        fresh = np.random.default_rng([*name.encode(), len(before)]).integers(0, 30_000, tokens)
        self.contexts[name] = np.concatenate([before, fresh]).astype(np.int32)
        turn = self.turns[name] = self.turns.get(name, -1) + 1
        prompt = self.contexts[name]
        self.scheduler.submit(
            TurnFacts(TurnMetadata(name, group, turn, epoch), len(prompt), 50, prompt if prompts else None),
            self.now,
        )

    def go(self, facts: list[ReplicaFacts]) -> list[Placement]:
        return self.scheduler.decide(facts, self.now)

    def answer(self, placement: Placement, cached: int | None = None) -> None:
        self.scheduler.finish(placement.ticket, Outcome(20, cached), self.now)

    def turn(
        self, name: str, tokens: int = 300, *, group: str = "g", epoch: int = 0, kv_tokens: int = 0
    ) -> int:
        self.submit(name, tokens, group, epoch)
        (placement,) = self.go(replicas(2, kv_tokens))
        self.answer(placement)
        self.now += 10.0
        return placement.replica


def test_a_trajectory_goes_where_its_kv_is() -> None:
    on = Driver()
    homes = {name: on.turn(name, group=name) for name in "abcd"}
    for _ in range(5):
        assert {name: on.turn(name, group=name) for name in "abcd"} == homes


@pytest.mark.parametrize("tokens", [30, 50, 70])
def test_a_trajectory_stays_even_when_it_is_shorter_than_a_block(tokens: int) -> None:
    on = Driver()
    on.contexts = {name: np.zeros(0, dtype=np.int32) for name in "abcdefgh"}
    homes = {name: on.turn(name, tokens, group=name) for name in "abcdefgh"}
    for _ in range(3):
        assert {name: on.turn(name, 30, group=name) for name in "abcdefgh"} == homes


def test_what_an_engine_says_it_had_evicted_is_believed() -> None:
    on = Driver()
    home = on.turn("t", 2000)
    on.submit("t", 100)
    (placement,) = on.go(replicas())
    on.answer(placement, cached=0)
    on.now += 10
    assert placement.replica == home
    assert on.scheduler.check_integrity()


class Reporting(Driver):
    """A driver of one replica whose engine says after each turn what it had found cached."""

    @property
    def headroom(self) -> float:
        policy = self.scheduler.policy
        assert isinstance(policy, WorkloadAware)
        return policy._admission.headroom.share

    def report(
        self, name: str, cached: int | None, tokens: int = 100, epoch: int = 0, *, prompts: bool = True
    ) -> None:
        self.submit(name, tokens, epoch=epoch, prompts=prompts)
        (placement,) = self.go(replicas(1))
        self.answer(placement, cached)
        self.now += 30.0


@pytest.mark.parametrize("prompts", [True, False])
def test_what_an_engine_computed_again_raises_the_headroom(prompts: bool) -> None:
    on = Reporting()
    on.report("t", 0, 100_000, prompts=prompts)
    assert on.headroom == 0
    on.report("t", 0, prompts=prompts)
    assert on.headroom > 0


def test_what_it_found_cached_does_not() -> None:
    on = Reporting()
    on.report("t", 0, 100_000)
    for _ in range(3):
        on.report("t", len(on.contexts["t"]) - 64)
    assert on.headroom == 0


def refit_without_prompts(on: Reporting) -> None:
    on.report("t", 0, 100_000, prompts=False)
    on.report("t", 0, epoch=1, prompts=False)


def refit_while_waiting(on: Reporting) -> None:
    on.submit("a", 600, group="a")
    (first,) = on.go(replicas(1, 1000))
    on.submit("t", 100_000)
    assert on.go(replicas(1, 1000)) == []
    on.submit("b", 10, group="b", epoch=1)
    on.answer(first, 0)
    on.scheduler.end("a")
    on.now += 30.0
    for placement in on.go(replicas(1)):
        on.answer(placement, 0)


def cancelled_and_asked_again(on: Reporting) -> None:
    on.submit("a", 600, group="a")
    (first,) = on.go(replicas(1, 1000))
    on.submit("t", 100_000)
    assert on.go(replicas(1, 1000)) == []
    assert on.scheduler.cancel(first.ticket + 1)
    on.answer(first, 0)
    on.report("t", 0)


def failed_and_placed_again(on: Reporting) -> None:
    on.submit("t", 100_000)
    (placement,) = on.go(replicas(1))
    on.scheduler.finish(placement.ticket, None, on.now)
    on.report("t", 0)


def replica_lost(on: Reporting) -> None:
    on.report("t", 0, 100_000)
    on.scheduler.lost(0)
    on.report("t", 0)


@pytest.mark.parametrize(
    "course",
    [
        refit_without_prompts,
        refit_while_waiting,
        cancelled_and_asked_again,
        failed_and_placed_again,
        replica_lost,
    ],
)
def test_what_was_never_answered_or_is_void_was_not_computed_before(
    course: Callable[[Reporting], None],
) -> None:
    on = Reporting()
    on.report("other", 0)
    course(on)
    on.now += 30.0
    on.report("other", len(on.contexts["other"]))
    assert on.headroom == 0


def test_an_engine_that_does_not_say_what_it_found_teaches_no_headroom() -> None:
    on = Reporting()
    on.report("t", None, 100_000)
    on.report("t", None)
    assert on.headroom == 0


def test_a_prompt_that_does_not_continue_the_last_one_was_not_computed_again() -> None:
    on = Reporting()
    on.report("t", 0, 100_000)
    on.contexts["t"] = np.arange(100_000, dtype=np.int32)
    on.report("t", 0)
    assert on.headroom == 0


def test_what_a_refit_made_void_was_not_computed_again() -> None:
    on = Reporting()
    on.report("t", 0, 100_000)
    on.report("t", 0, epoch=1)
    assert on.headroom == 0


def test_after_a_refit_nothing_ties_a_trajectory_to_its_replica() -> None:
    on = Driver()
    home = on.turn("t", 3000)
    for number in range(6):  # the replica gets busy with others
        on.submit(f"other{number}", 10, group="other", epoch=0)
    on.go(replicas(2, **{f"r{1 - home}": False}))
    assert on.turn("t", 10) == home
    assert on.turn("t", 10, epoch=1) != home


def test_a_turn_waits_while_no_cache_has_room_and_goes_when_it_has_waited_for_too_long() -> None:
    on = Driver(Options(patience_s=30))
    facts = replicas(1, kv_tokens=1000)
    on.submit("a", 600, group="a")
    (first,) = on.go(facts)
    on.submit("b", 600, group="b")
    assert on.go(facts) == []
    on.now = 29.0
    assert on.go(facts) == []
    on.now = 31.0
    assert [placement.trajectory for placement in on.go(facts)] == ["b"]
    on.answer(first)


def test_room_is_made_by_a_trajectory_that_ends() -> None:
    on = Driver()
    facts = replicas(1, kv_tokens=1000)
    on.submit("a", 600, group="a")
    (first,) = on.go(facts)
    on.submit("b", 600, group="b")
    assert on.go(facts) == []
    on.answer(first)
    assert on.go(facts) == []  # its tool runs, and it will be back
    on.scheduler.end("a")
    assert [placement.trajectory for placement in on.go(facts)] == ["b"]


def test_at_low_load_nothing_waits() -> None:
    on = Driver()
    facts = replicas(4, kv_tokens=100_000)
    for number in range(40):
        on.submit(f"t{number}", 300)
    assert len(on.go(facts)) == 40


def test_a_straggler_moves_to_an_idle_replica_when_that_is_worth_the_prefill() -> None:
    def home_again(tokens: int) -> bool:
        on = Driver()
        for number in range(4):  # trajectories go on for long here
            for _ in range(20):
                on.turn(f"old{number}", 20, group="old")
            on.scheduler.end(f"old{number}")
        home = on.turn("t", tokens)
        for number in range(30):
            on.submit(f"other{number}", 500, group=f"other{number}")
        on.go(replicas(2, **{f"r{1 - home}": False}))
        return on.turn("t", 20) == home

    assert not home_again(300)
    assert home_again(120_000)


@pytest.mark.parametrize("busy", [0, 300])
@pytest.mark.parametrize("speculates", [True, False])
def test_siblings_share_a_replica_where_it_drafts_from_them_and_is_not_full(
    speculates: bool, busy: int
) -> None:
    facts = [replace(each, speculates=speculates) for each in replicas(2)]
    on = Driver()
    for number in range(busy):
        on.submit(f"other{number}", 300, group="others", prompts=False)
    on.go(facts)
    for number in range(2):
        on.submit(f"t{number}", 300, prompts=False)
    together = len({placement.replica for placement in on.go(facts)}) == 1
    assert together == (speculates and not busy)


def test_the_tail_of_a_step_is_critical_and_its_beginning_is_not() -> None:
    on = Driver()
    on.scheduler.begin_step(20)
    on.submit("t0", 10)
    assert [placement.critical for placement in on.go(replicas())] == [False]
    for number in range(1, 19):
        on.turn(f"t{number}", 10)
        on.scheduler.end(f"t{number}")
    on.submit("t19", 10)
    (last,) = on.go(replicas())
    assert last.critical


def test_each_term_of_the_cost_can_be_left_out() -> None:
    for name in Weights._fields:
        on = Driver(Options(weights=Weights(**{name: 0.0})))
        for each in "abc":
            on.turn(each, kv_tokens=2000)
        assert on.scheduler.check_integrity()


def test_a_stream_of_prompts_that_share_nothing_leaves_memory_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (progress, siblings):  # so that what is kept of groups has its full size soon
        monkeypatch.setattr(module, "_GROUPS", 100)
    on = Driver()

    def stream(numbers: range) -> int:
        for number in numbers:
            on.turn(f"t{number}", group=f"g{number}", kv_tokens=20_000)
            on.scheduler.end(f"t{number}")
            del on.contexts[f"t{number}"], on.turns[f"t{number}"]
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        grown = -stream(range(500)) + stream(range(500, 1500))
    finally:
        tracemalloc.stop()
    assert grown < 70 * 1000  # bytes: less than one entry anywhere for each


def test_two_turns_of_one_trajectory_at_once_are_told_apart() -> None:
    on = Driver()
    on.submit("t", 100)
    on.submit("t", 100)
    first, second = on.go(replicas())
    on.answer(first)
    on.answer(second)
    assert on.scheduler.check_integrity()
    assert on.scheduler.running == 0


def test_what_a_policy_learned_lets_another_expect_the_same() -> None:
    before, after = Driver(), Driver()
    for number in range(40):
        for _ in range(1 + number % 7):
            before.turn(f"t{number}", group=f"g{number // 4}")
        before.scheduler.end(f"t{number}")
    policy = before.scheduler.policy
    assert isinstance(policy, WorkloadAware)
    policy._admission.headroom.share = 0.125
    after.scheduler.policy.restore(policy.state())
    found = []
    for each in (before, after):
        each.submit("new", 100, "g3")
        (placement,) = each.go(replicas())
        found.append(placement.remaining)
    assert found[0] == found[1] != 50
    assert after.scheduler.policy.state().arrays["headroom/share"] == 0.125


def test_a_policy_that_learns_nothing_has_no_state() -> None:
    assert Sticky().state() is None
    Sticky().restore(WorkloadAware().state())


@pytest.mark.parametrize("share", [0.31, 1e9])
def test_more_headroom_than_there_may_be_is_refused(share: float) -> None:
    state = WorkloadAware().state()
    state.arrays["headroom/share"] = np.array(share)  # type: ignore[index]
    with pytest.raises(ValueError, match="share has a number above"):
        WorkloadAware().restore(state)
