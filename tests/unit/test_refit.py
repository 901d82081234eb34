from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest

from nemo_war.generation.refit import Phase, RefitCycle, RefitError, Stage, Transition

PHASES = {
    ("serving", "quieting"),
    ("quieting", "updating"),
    ("updating", "resetting"),
    ("resetting", "serving"),
    *((phase, "failed") for phase in ("quieting", "updating", "resetting")),
}
STAGES = {
    ("serving", "quieting"),
    ("quieting", "quiet"),
    ("quiet", "updating"),
    ("updating", "updated"),
    ("updated", "resetting"),
    ("resetting", "fresh"),
    ("fresh", "serving"),
    ("fenced", "quieting"),
    ("fenced", "updating"),
    ("updating", "quieting"),
    ("resetting", "quieting"),
    *((stage.value, "fenced") for stage in Stage if stage is not Stage.FENCED),
}
"""Written down a second time, so that a transition is not added or lost by accident."""

QUIET_S, UPDATE_S = 10.0, 20.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Fleet:
    """A cycle, its clock and what it recorded, with the reports of replicas that do as they should."""

    def __init__(self, replicas: int = 2, on_failure: str = "fail", digest: str = "") -> None:
        self.clock = Clock()
        self.numbers = range(replicas)
        self.transitions: list[Transition] = []
        self.serving: list[list[bool]] = []  # who served as each was told of
        self.cycle = RefitCycle(
            range(replicas),
            in_flight="drain",
            on_failure=on_failure,  # type: ignore[arg-type]
            quiet_timeout_s=QUIET_S,
            update_timeout_s=UPDATE_S,
            clock=self.clock,
            digest=digest,
            record=self.listen,
        )

    def listen(self, transition: Transition) -> None:
        self.transitions.append(transition)
        self.serving.append([self.cycle.serves(replica) for replica in self.numbers])

    def begin(self, *members: int, digest: str = "w1") -> None:
        self.cycle.begin(digest, members or self.numbers)
        self.digest = digest

    def report(self, replica: int) -> None:
        """What the replica is waited for, as it should be."""
        stage = self.cycle.stage_of(replica)
        if stage is Stage.QUIETING:
            assert self.cycle.quiet(replica)
        elif stage is Stage.UPDATING:
            assert self.cycle.updated(replica, self.digest)
        else:
            assert self.cycle.reset(replica, True)

    def advance(self, phase: Phase = Phase.SERVING) -> None:
        """All that are waited for report, until the fleet is there."""
        while self.cycle.phase is not phase:
            assert self.cycle.waiting_for, f"{self.cycle.phase} and waits for nobody"
            for replica in sorted(self.cycle.waiting_for):
                self.report(replica)

    def complete(self, *members: int, digest: str = "w1") -> None:
        self.begin(*members, digest=digest)
        self.advance()

    @property
    def stages(self) -> dict[int, Stage]:
        return {replica: self.cycle.stage_of(replica) for replica in self.numbers}


def fleet_at(stage: Stage, on_failure: str = "continue") -> Fleet:
    """Replica 0 of two is in this stage, in a refit unless it serves or is fenced."""
    fleet = Fleet(2, on_failure)
    if stage is Stage.SERVING:
        return fleet
    if stage is Stage.FENCED:
        fleet.complete(1)
        return fleet
    fleet.begin()
    while fleet.cycle.stage_of(0) is not stage:
        fleet.report(min(fleet.cycle.waiting_for))
    return fleet


def rejoining(stage: Stage = Stage.UPDATING) -> Fleet:
    """A fleet of two that serves; replica 0 rejoins and is in this stage."""
    fleet = Fleet(2)
    fleet.complete(1)
    fleet.cycle.rejoin(0)
    if stage is Stage.RESETTING:
        fleet.report(0)
    assert fleet.cycle.stage_of(0) is stage
    return fleet


# A refit of all.


def test_the_epoch_rises_when_every_replica_loaded_and_reset() -> None:
    fleet = Fleet()
    fleet.complete()
    assert (fleet.cycle.phase, fleet.cycle.epoch, fleet.cycle.digest) == (Phase.SERVING, 1, "w1")
    fleet.complete(digest="w2")
    assert (fleet.cycle.phase, fleet.cycle.epoch, fleet.cycle.digest) == (Phase.SERVING, 2, "w2")


def test_nothing_is_admitted_and_nobody_serves_from_begin_to_the_last_reset() -> None:
    fleet = Fleet()
    assert fleet.cycle.admits
    assert fleet.cycle.serves(0)
    fleet.begin()
    reports = 0
    while fleet.cycle.waiting_for:
        assert not fleet.cycle.admits
        assert not any(map(fleet.cycle.serves, range(2)))
        assert (fleet.cycle.epoch, fleet.cycle.digest) == (0, "")
        fleet.report(min(fleet.cycle.waiting_for))
        reports += 1
    assert reports == 6
    assert fleet.cycle.admits
    assert all(map(fleet.cycle.serves, range(2)))


def test_whoever_listens_never_sees_a_replica_serve_while_the_fleet_does_not() -> None:
    fleet = Fleet()
    fleet.complete()
    assert fleet.serving == [[False, False]] * (len(fleet.serving) - 1) + [[True, True]]


@pytest.mark.parametrize(
    ("phase", "after", "waits"),
    [
        (Phase.QUIETING, Stage.QUIET, Stage.UPDATING),
        (Phase.UPDATING, Stage.UPDATED, Stage.RESETTING),
        (Phase.RESETTING, Stage.FRESH, Stage.SERVING),
    ],
)
def test_a_phase_waits_for_its_last_replica(phase: Phase, after: Stage, waits: Stage) -> None:
    fleet = Fleet(3)
    fleet.begin()
    fleet.advance(phase)
    fleet.report(0)
    fleet.report(2)
    assert fleet.cycle.phase is phase
    assert fleet.cycle.waiting_for == {1}
    assert fleet.stages == {0: after, 1: Stage(phase), 2: after}
    fleet.report(1)
    assert set(fleet.stages.values()) == {waits}
    assert fleet.cycle.phase.value == waits.value


def test_transitions_are_recorded_with_the_epoch_they_lead_to() -> None:
    fleet = Fleet(1)
    fleet.complete()
    told = [(each.replica, each.before, each.after, each.epoch) for each in fleet.transitions]
    assert told == [
        (None, Phase.SERVING, Phase.QUIETING, 0),
        (0, Stage.SERVING, Stage.QUIETING, 0),
        (0, Stage.QUIETING, Stage.QUIET, 0),
        (0, Stage.QUIET, Stage.UPDATING, 0),
        (None, Phase.QUIETING, Phase.UPDATING, 0),
        (0, Stage.UPDATING, Stage.UPDATED, 0),
        (0, Stage.UPDATED, Stage.RESETTING, 0),
        (None, Phase.UPDATING, Phase.RESETTING, 0),
        (0, Stage.RESETTING, Stage.FRESH, 0),
        (0, Stage.FRESH, Stage.SERVING, 1),
        (None, Phase.RESETTING, Phase.SERVING, 1),
    ]
    assert not any(each.reason for each in fleet.transitions)


def test_a_replica_has_no_epoch_between_the_old_weights_and_serving_with_the_new() -> None:
    fleet = Fleet(1)
    seen = {Stage.SERVING: fleet.cycle.epoch_of(0)}
    fleet.begin()
    while fleet.cycle.waiting_for:
        seen[fleet.cycle.stage_of(0)] = fleet.cycle.epoch_of(0)
        fleet.report(0)
    assert seen == {Stage.SERVING: 0, Stage.QUIETING: 0, Stage.UPDATING: None, Stage.RESETTING: None}
    assert fleet.cycle.epoch_of(0) == 1


@pytest.mark.parametrize("in_flight", ["drain", "pause", "abort"])
def test_what_is_done_to_running_turns_is_kept_for_the_shell(in_flight: str) -> None:
    cycle = RefitCycle(
        [0],
        in_flight=in_flight,  # type: ignore[arg-type]
        quiet_timeout_s=1,
        update_timeout_s=1,
        clock=Clock(),
    )
    assert cycle.in_flight == in_flight


def test_a_cycle_needs_a_replica() -> None:
    with pytest.raises(ValueError, match="at least one replica"):
        Fleet(0)


# A refit of some.


def test_those_that_are_not_part_of_a_refit_are_fenced_as_stale() -> None:
    fleet = Fleet(3)
    fleet.begin(0, 2)
    assert fleet.cycle.fenced == {1: "replica 1 is not part of the refit"}
    assert fleet.cycle.waiting_for == {0, 2}
    fleet.advance()
    assert fleet.cycle.epoch == 1
    assert [fleet.cycle.serves(replica) for replica in range(3)] == [True, False, True]
    assert [fleet.cycle.epoch_of(replica) for replica in range(3)] == [1, 0, 1]


def test_a_fenced_replica_comes_back_as_a_member_of_the_next_refit() -> None:
    fleet = Fleet(2)
    fleet.complete(1)
    fleet.complete(digest="w2")
    assert fleet.cycle.fenced == {}
    assert [fleet.cycle.epoch_of(replica) for replica in range(2)] == [2, 2]


def test_a_replica_that_was_fenced_before_a_refit_without_it_keeps_its_reason() -> None:
    fleet = Fleet(2)
    fleet.cycle.fence(0, "died")
    fleet.begin(1)
    assert fleet.cycle.fenced == {0: "replica 0 died"}


@pytest.mark.parametrize(
    ("members", "digest", "says"),
    [
        ([], "w", "allowed are one or more of"),
        ([0, 7], "w", "allowed are one or more of"),
        ([0], "", "an empty digest"),
    ],
)
def test_a_refit_of_nobody_strangers_or_nothing_does_not_begin(
    members: list[int], digest: str, says: str
) -> None:
    fleet = Fleet()
    with pytest.raises(ValueError, match=says):
        fleet.cycle.begin(digest, members)
    assert fleet.cycle.admits
    assert fleet.transitions == []


def test_a_second_refit_cannot_begin_during_the_first() -> None:
    fleet = Fleet()
    fleet.begin()
    with pytest.raises(RefitError, match="no transition from quieting to quieting"):
        fleet.begin(0, digest="w2")
    assert fleet.cycle.waiting_for == {0, 1}
    fleet.advance()
    assert (fleet.cycle.epoch, fleet.cycle.digest) == (1, "w1")


# Failures.


def test_a_refused_reset_fails_the_fleet_and_names_the_replica() -> None:
    fleet = Fleet()
    fleet.begin()
    fleet.advance(Phase.RESETTING)
    fleet.report(0)
    assert fleet.cycle.reset(1, False)
    assert fleet.cycle.phase is Phase.FAILED
    assert fleet.cycle.reason == "replica 1 did not reset its prefix cache"
    assert fleet.cycle.fenced == {1: fleet.cycle.reason}
    assert fleet.cycle.epoch == 0


def test_other_bytes_than_those_sent_fail_the_fleet() -> None:
    fleet = Fleet()
    fleet.begin(digest="s" * 20)
    fleet.advance(Phase.UPDATING)
    assert fleet.cycle.updated(0, "g" * 20)
    assert fleet.cycle.phase is Phase.FAILED
    assert fleet.cycle.reason == f"replica 0 loaded weights {'g' * 12}, not {'s' * 12}"


def test_the_old_bytes_are_other_bytes() -> None:
    fleet = Fleet(digest="w0")
    fleet.begin()
    fleet.advance(Phase.UPDATING)
    fleet.cycle.updated(0, "w0")
    assert fleet.cycle.phase is Phase.FAILED


@pytest.mark.parametrize("stage", [stage for stage in Stage if stage not in (Stage.SERVING, Stage.FENCED)])
def test_a_fence_fails_the_refit_whatever_the_replica_was_doing(stage: Stage) -> None:
    fleet = fleet_at(stage, "fail")
    assert fleet.cycle.fence(0, "died")
    assert (fleet.cycle.phase, fleet.cycle.reason) == (Phase.FAILED, "replica 0 died")
    assert not fleet.cycle.admits
    assert fleet.cycle.waiting_for == frozenset()
    assert [(each.replica, each.after, each.reason) for each in fleet.transitions[-2:]] == [
        (0, Stage.FENCED, "replica 0 died"),
        (None, Phase.FAILED, "replica 0 died"),
    ]


@pytest.mark.parametrize("stage", [stage for stage in Stage if stage not in (Stage.SERVING, Stage.FENCED)])
def test_the_others_go_on_without_a_fenced_replica_if_they_may(stage: Stage) -> None:
    fleet = fleet_at(stage)
    fleet.cycle.fence(0, "died")
    assert fleet.cycle.phase is not Phase.FAILED
    fleet.advance()
    assert (fleet.cycle.epoch, fleet.cycle.reason) == (1, "")
    assert [fleet.cycle.serves(replica) for replica in range(2)] == [False, True]
    assert fleet.cycle.fenced == {0: "replica 0 died"}


@pytest.mark.parametrize("phase", [Phase.QUIETING, Phase.UPDATING, Phase.RESETTING])
def test_the_others_need_not_wait_any_more_for_the_one_that_was_fenced(phase: Phase) -> None:
    fleet = Fleet(3, "continue")
    fleet.begin()
    fleet.advance(phase)
    fleet.report(0)
    fleet.report(1)
    assert fleet.cycle.phase is phase
    fleet.cycle.fence(2, "died")
    assert (phase, fleet.cycle.phase) in PHASES
    assert fleet.cycle.phase is not Phase.FAILED


@pytest.mark.parametrize("phase", [Phase.QUIETING, Phase.UPDATING, Phase.RESETTING])
def test_a_fleet_without_any_replica_left_fails_even_if_it_may_go_on(phase: Phase) -> None:
    fleet = Fleet(2, "continue")
    fleet.begin()
    fleet.advance(phase)
    fleet.cycle.fence(1, "died")
    assert fleet.cycle.phase is phase
    fleet.cycle.fence(0, "hung")
    assert (fleet.cycle.phase, fleet.cycle.epoch) == (Phase.FAILED, 0)
    assert fleet.cycle.reason == "no replica is left: replica 0 hung"


@pytest.mark.parametrize("on_failure", ["fail", "continue"])
def test_a_serving_fleet_goes_on_serving_whoever_is_fenced(on_failure: str) -> None:
    fleet = Fleet(2, on_failure)
    for replica in (0, 1):
        assert fleet.cycle.fence(replica, "died")
        assert not fleet.cycle.serves(replica)
        assert fleet.cycle.admits
    fleet.complete()
    assert fleet.cycle.serves(0)


def test_the_first_reason_for_a_fence_stands() -> None:
    fleet = Fleet()
    assert fleet.cycle.fence(0, "died")
    assert not fleet.cycle.fence(0, "was buried")
    assert fleet.cycle.fenced == {0: "replica 0 died"}
    assert len(fleet.transitions) == 1


def test_failed_is_final() -> None:
    fleet = Fleet()
    fleet.begin()
    fleet.cycle.fence(0, "died")
    with pytest.raises(RefitError, match="no transition from failed to quieting: replica 0 died"):
        fleet.begin()
    with pytest.raises(RefitError, match="replica 0 cannot rejoin while the fleet is failed"):
        fleet.cycle.rejoin(0)
    fleet.cycle.fence(1, "died as well")  # worth knowing, and no other reason
    assert (fleet.cycle.phase, fleet.cycle.reason) == (Phase.FAILED, "replica 0 died")
    assert fleet.cycle.fenced == {0: "replica 0 died", 1: "replica 1 died as well"}


REPORTS: dict[str, Callable[[RefitCycle], bool]] = {
    "quiet": lambda cycle: cycle.quiet(0),
    "updated": lambda cycle: cycle.updated(0, "w1"),
    "updated wrongly": lambda cycle: cycle.updated(0, "other"),
    "reset": lambda cycle: cycle.reset(0, True),
    "not reset": lambda cycle: cycle.reset(0, False),
}
FITTING = {
    Stage.QUIETING: {"quiet"},
    Stage.UPDATING: {"updated", "updated wrongly"},
    Stage.RESETTING: {"reset", "not reset"},
}


@pytest.mark.parametrize(("stage", "report"), product(Stage, REPORTS))
def test_a_report_fits_its_stage_is_too_late_or_is_refused(stage: Stage, report: str) -> None:
    fleet = fleet_at(stage)
    before, count = fleet.stages, len(fleet.transitions)
    if report in FITTING.get(stage, ()):
        assert REPORTS[report](fleet.cycle) is True
        assert fleet.stages != before
        return
    if stage is Stage.FENCED:
        assert REPORTS[report](fleet.cycle) is False
    else:
        with pytest.raises(RefitError, match=f"replica 0 reported on .* while it is {stage}"):
            REPORTS[report](fleet.cycle)
    assert fleet.stages == before
    assert len(fleet.transitions) == count


@pytest.mark.parametrize(("phase", "report"), product([*FITTING], REPORTS))
def test_no_report_moves_a_fleet_that_failed(phase: Stage, report: str) -> None:
    fleet = fleet_at(phase, "fail")
    fleet.cycle.fence(1, "died")
    before, count = fleet.stages, len(fleet.transitions)
    assert REPORTS[report](fleet.cycle) is False
    assert fleet.stages == before
    assert len(fleet.transitions) == count


@pytest.mark.parametrize(
    "act",
    [
        lambda cycle: cycle.quiet(7),
        lambda cycle: cycle.updated(7, "w1"),
        lambda cycle: cycle.reset(7, True),
        lambda cycle: cycle.fence(7, "died"),
        lambda cycle: cycle.rejoin(7),
        lambda cycle: cycle.serves(7),
        lambda cycle: cycle.epoch_of(7),
    ],
)
def test_a_replica_of_another_fleet_is_refused(act: Callable[[RefitCycle], object]) -> None:
    with pytest.raises(RefitError, match="replica 7 is not of this fleet"):
        act(Fleet(digest="w0").cycle)


# Rejoining.


def test_a_replica_rejoins_without_barrier_and_without_a_new_epoch() -> None:
    fleet = Fleet(3)
    fleet.complete(2)
    for replica in (0, 1):
        fleet.cycle.rejoin(replica)
    assert fleet.cycle.fenced == {}
    assert fleet.cycle.waiting_for == {0, 1}
    assert fleet.cycle.updated(0, "w1")
    assert (fleet.cycle.stage_of(0), fleet.cycle.serves(0)) == (Stage.RESETTING, False)
    assert fleet.cycle.reset(0, True)
    assert [fleet.cycle.serves(replica) for replica in range(3)] == [True, False, True]
    assert [fleet.cycle.epoch_of(replica) for replica in range(3)] == [1, None, 1]
    assert fleet.cycle.admits
    assert fleet.cycle.epoch == 1
    assert [each.after for each in fleet.transitions if each.replica is None][-1] is Phase.SERVING
    assert [(each.after, each.epoch) for each in fleet.transitions if each.replica == 0][-5:] == [
        (Stage.UPDATING, 1),
        (Stage.UPDATED, 1),
        (Stage.RESETTING, 1),
        (Stage.FRESH, 1),
        (Stage.SERVING, 1),
    ]


def test_a_replica_can_rejoin_before_any_refit_if_the_first_weights_have_a_name() -> None:
    fleet = Fleet(digest="w0")
    fleet.cycle.fence(0, "died")
    fleet.cycle.rejoin(0)
    assert fleet.cycle.updated(0, "w0")
    assert fleet.cycle.reset(0, True)
    assert fleet.cycle.serves(0)
    assert fleet.cycle.epoch_of(0) == 0


def test_a_replica_cannot_rejoin_weights_without_a_name() -> None:
    fleet = Fleet()
    fleet.cycle.fence(0, "died")
    with pytest.raises(RefitError, match="replica 0 cannot rejoin: the weights of epoch 0 have no name"):
        fleet.cycle.rejoin(0)
    assert fleet.cycle.fenced == {0: "replica 0 died"}


def test_a_replica_cannot_rejoin_during_a_refit() -> None:
    fleet = Fleet(digest="w0")
    fleet.begin(1)
    with pytest.raises(RefitError, match="replica 0 cannot rejoin while the fleet is quieting"):
        fleet.cycle.rejoin(0)


@pytest.mark.parametrize("stage", [Stage.SERVING, Stage.UPDATING, Stage.RESETTING])
def test_only_a_fenced_replica_rejoins(stage: Stage) -> None:
    fleet = Fleet(digest="w0") if stage is Stage.SERVING else rejoining(stage)
    with pytest.raises(RefitError, match=f"replica 0: no transition from {stage} to updating"):
        fleet.cycle.rejoin(0)


@pytest.mark.parametrize(
    ("stage", "fail", "reason"),
    [
        (Stage.UPDATING, lambda cycle: cycle.updated(0, "w0"), "replica 0 loaded weights w0, not w1"),
        (Stage.RESETTING, lambda cycle: cycle.reset(0, False), "replica 0 did not reset its prefix cache"),
        (Stage.RESETTING, lambda cycle: cycle.fence(0, "died"), "replica 0 died"),
    ],
)
def test_a_failed_rejoin_fences_again_and_does_not_fail_the_fleet(
    stage: Stage, fail: Callable[[RefitCycle], bool], reason: str
) -> None:
    fleet = rejoining(stage)
    assert fail(fleet.cycle)
    assert fleet.cycle.fenced == {0: reason}
    assert fleet.cycle.admits
    assert fleet.cycle.serves(1)
    assert fleet.cycle.epoch_of(0) is None


@pytest.mark.parametrize("stage", [Stage.UPDATING, Stage.RESETTING])
def test_a_refit_takes_over_a_member_that_rejoins(stage: Stage) -> None:
    fleet = rejoining(stage)
    fleet.begin(digest="w2")
    assert fleet.cycle.stage_of(0) is Stage.QUIETING
    fleet.advance()
    assert [fleet.cycle.epoch_of(replica) for replica in range(2)] == [2, 2]


def test_a_member_that_was_rejoining_has_the_refits_deadline_and_no_other() -> None:
    fleet = rejoining()
    fleet.clock.now = UPDATE_S - 1
    fleet.begin(digest="w2")
    fleet.clock.now += QUIET_S
    fleet.cycle.check_deadlines()
    assert fleet.cycle.waiting_for == {0, 1}
    fleet.report(0)
    fleet.clock.now += 0.1
    fleet.cycle.check_deadlines()
    assert fleet.cycle.fenced.keys() == {1}


@pytest.mark.parametrize("stage", [Stage.UPDATING, Stage.RESETTING])
def test_a_refit_without_it_fences_a_replica_that_rejoins(stage: Stage) -> None:
    fleet = rejoining(stage)
    fleet.begin(1, digest="w2")
    assert fleet.cycle.fenced == {0: "replica 0 is not part of the refit"}
    assert not fleet.cycle.updated(0, "w1")


# Deadlines.


@pytest.mark.parametrize(
    ("phase", "seconds"),
    [(Phase.QUIETING, QUIET_S), (Phase.UPDATING, UPDATE_S), (Phase.RESETTING, UPDATE_S)],
)
def test_each_phase_has_a_deadline_of_its_own_and_who_is_late_is_named(phase: Phase, seconds: float) -> None:
    fleet = Fleet()
    fleet.begin()
    fleet.clock.now = 7.0
    fleet.advance(phase)
    fleet.report(0)
    fleet.clock.now = 7.0 * (phase is not Phase.QUIETING) + seconds
    fleet.cycle.check_deadlines()
    assert fleet.cycle.phase is phase
    fleet.clock.now += 0.1
    fleet.cycle.check_deadlines()
    assert fleet.cycle.phase is Phase.FAILED
    assert fleet.cycle.reason == f"replica 1 still {phase} after {seconds:g} s"


def test_all_that_are_late_are_fenced_and_the_others_go_on() -> None:
    fleet = Fleet(4, "continue")
    fleet.begin()
    fleet.advance(Phase.UPDATING)
    fleet.report(0)
    fleet.report(2)
    fleet.clock.now = UPDATE_S + 1
    fleet.cycle.check_deadlines()
    assert fleet.cycle.phase is Phase.RESETTING
    assert fleet.cycle.fenced == {
        replica: f"replica {replica} still updating after {UPDATE_S:g} s" for replica in (1, 3)
    }


def test_a_failed_fleet_knows_all_that_were_late_and_has_no_deadline_left() -> None:
    fleet = Fleet(3)
    fleet.begin()
    fleet.report(0)
    fleet.clock.now = QUIET_S + 1
    fleet.cycle.check_deadlines()
    assert fleet.cycle.reason == f"replica 1 still quieting after {QUIET_S:g} s"
    assert fleet.cycle.fenced.keys() == {1, 2}
    count = len(fleet.transitions)
    fleet.clock.now = 1e9
    fleet.cycle.check_deadlines()
    assert len(fleet.transitions) == count


@pytest.mark.parametrize("stage", [Stage.UPDATING, Stage.RESETTING])
def test_a_rejoin_has_its_own_deadline(stage: Stage) -> None:
    fleet = Fleet()
    fleet.complete(1)
    fleet.clock.now = 100.0
    fleet.cycle.rejoin(0)
    if stage is Stage.RESETTING:
        fleet.clock.now += UPDATE_S - 1
        fleet.report(0)
    fleet.clock.now += UPDATE_S
    fleet.cycle.check_deadlines()
    assert fleet.cycle.stage_of(0) is stage
    fleet.clock.now += 0.1
    fleet.cycle.check_deadlines()
    assert fleet.cycle.fenced == {0: f"replica 0 still {stage} after {UPDATE_S:g} s"}
    assert fleet.cycle.admits


def test_serving_has_no_deadline() -> None:
    fleet = Fleet()
    fleet.complete()
    fleet.clock.now = 1e9
    fleet.cycle.check_deadlines()
    assert all(map(fleet.cycle.serves, range(2)))


# The tables.


@pytest.mark.parametrize(("before", "after"), product(Stage, Stage))
def test_a_replica_makes_no_other_transition(before: Stage, after: Stage) -> None:
    fleet = Fleet(1)
    replica = fleet.cycle._replicas[0]
    replica.stage = before
    if (before, after) in STAGES:
        fleet.cycle._move(replica, after)
        assert fleet.cycle.stage_of(0) is after
        return
    with pytest.raises(RefitError, match=f"replica 0: no transition from {before} to {after}"):
        fleet.cycle._move(replica, after)
    assert fleet.cycle.stage_of(0) is before
    assert fleet.transitions == []


@pytest.mark.parametrize(("before", "after"), product(Phase, Phase))
def test_a_fleet_makes_no_other_transition(before: Phase, after: Phase) -> None:
    fleet = Fleet(1)
    fleet.cycle.phase = before
    if (before, after) in PHASES:
        fleet.cycle._enter(after)
        assert fleet.cycle.phase is after
        return
    with pytest.raises(RefitError, match=f"no transition from {before} to {after}"):
        fleet.cycle._enter(after)
    assert fleet.cycle.phase is before
    assert fleet.transitions == []


def lives() -> Iterator[Fleet]:
    """Fleets that between them do all there is to do."""
    fenced = [fleet_at(stage, on_failure) for stage in Stage for on_failure in ("fail", "continue")]
    for fleet in fenced:
        fleet.cycle.fence(0, "died")
    yield from fenced
    back = fleet_at(Stage.FENCED)
    back.complete(digest="w2")
    yield back
    for stage in (Stage.UPDATING, Stage.RESETTING):
        taken_over = rejoining(stage)
        taken_over.complete(digest="w2")
        yield taken_over


def test_every_transition_that_exists_happens() -> None:
    seen = [each for fleet in lives() for each in fleet.transitions]
    assert {(each.before, each.after) for each in seen if each.replica is None} == PHASES
    assert {(each.before, each.after) for each in seen if each.replica is not None} == STAGES


def test_a_run_that_goes_on_counts_on() -> None:
    records: list[Transition] = []
    cycle = RefitCycle(
        range(2), in_flight="drain", quiet_timeout_s=10, update_timeout_s=20, clock=Clock(), epoch=6,
        record=records.append,
    )  # fmt: skip
    assert (cycle.epoch, cycle.epoch_of(1)) == (6, 6)
    cycle.begin("w7", [0, 1])
    for report in (cycle.quiet, lambda number: cycle.updated(number, "w7"), lambda n: cycle.reset(n, True)):
        report(0), report(1)
    assert (cycle.epoch, cycle.epoch_of(1), records[-1].epoch) == (7, 7, 7)
