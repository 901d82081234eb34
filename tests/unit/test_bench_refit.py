"""The refit benchmark's arithmetic."""

from __future__ import annotations

import itertools

import pytest

from nemo_war.generation.refit import Phase, Stage, Transition
from tools.refit_bench import timing
from tools.refit_bench.drafting import Drafting, shares, total
from tools.refit_bench.timing import RefitTiming, Stopwatch, summary


def test_acceptance_counts_what_was_added_since_the_phase_began() -> None:
    before = {"drafts": 10, "draft_tokens": 40, "accepted_tokens": 30, "engine_steps": 7}
    after = {"drafts": 30, "draft_tokens": 140, "accepted_tokens": 70, "engine_steps": 90}
    done = Drafting.between(5, 120, before, after)
    assert done == Drafting(5, 120, 20, 100, 40)
    assert done.acceptance_length == 3
    assert done.draft_share == 20 / 80
    assert done.tokens_per_step == 120 / 80
    assert done.facts()["acceptance_length"] == 3


def test_a_replica_that_was_started_again_counts_from_nothing() -> None:
    after = {"drafts": 30, "draft_tokens": 140, "accepted_tokens": 70}
    assert Drafting.between(5, 120, {}, after).drafts == 30


def test_phases_are_weighted_by_their_drafts_and_not_averaged() -> None:
    few, many = Drafting(1, 20, 1, 8, 8), Drafting(1, 100, 99, 99, 0)
    assert total([few, many]).acceptance_length == pytest.approx(1.08)
    assert shares(few, many) == {"acceptance_length": 9, "tokens_per_step": 1.667}
    assert total([]) == Drafting()


def test_without_drafts_there_is_no_length_and_no_share() -> None:
    none = Drafting(3, 50)
    assert none.acceptance_length is None
    assert none.facts()["acceptance_length"] is None
    some = Drafting(1, 20, 4, 8, 10)
    assert shares(none, some) == {"acceptance_length": None, "tokens_per_step": 0.5}
    assert shares(some, none) == {"acceptance_length": None, "tokens_per_step": 2}


def test_overhead_is_what_is_not_loading_and_its_wait_is_told_apart() -> None:
    refits = [RefitTiming(total, quiet=0.5, load=1.0, reset=0.01, in_flight=4) for total in (1.6, 2.0, 3.0)]
    told = summary(refits, [1.1, 1.2, 1.0])
    assert (told["load_s"], told["refit_s"], told["overhead_s"]) == (1.0, 2.0, 1.0)
    assert told["overhead_share"] == 0.5
    assert told["overhead_after_quiet_s"] == 0.5
    assert told["refit_range_s"] == [1.6, 3.0]
    assert told["over_baseline_s"] == pytest.approx(0.9)


def test_the_stopwatch_times_the_phases_of_the_last_refit_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock) ** 2))
    stopwatch = Stopwatch()
    order = [Phase.SERVING, Phase.QUIETING, Phase.UPDATING, Phase.RESETTING, Phase.SERVING]
    for _ in range(2):
        for phase, following in itertools.pairwise(order):
            stopwatch.record(Transition(None, phase, following, 0, ""))
            stopwatch.record(Transition(0, Stage.SERVING, Stage.QUIETING, 0, ""))
    assert [stopwatch.seconds(phase) for phase in order[1:4]] == [9, 11, 13]
