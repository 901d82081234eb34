from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_war.generation.refit import Phase, RefitCycle, RefitError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def cycle(replicas: int = 2, in_flight: str = "drain", clock: Clock | None = None) -> RefitCycle:
    return RefitCycle(
        range(replicas), in_flight=in_flight, quiet_timeout_s=10, update_timeout_s=20, clock=clock or Clock()
    )


def complete(machine: RefitCycle, replicas: int = 2, digest: str = "w1") -> None:
    machine.begin(digest)
    for replica in range(replicas):
        machine.quiet(replica)
    for replica in range(replicas):
        machine.updated(replica, digest)
    for replica in range(replicas):
        machine.verified(replica, kv_reset=True)


def test_the_epoch_rises_when_every_replica_loaded_and_reset() -> None:
    machine = cycle()
    complete(machine)
    assert (machine.phase, machine.epoch, machine.admits) == (Phase.SERVING, 1, True)
    complete(machine, digest="w2")
    assert machine.epoch == 2


@pytest.mark.parametrize(("in_flight", "phase"), [("drain", Phase.DRAINING), ("pause", Phase.PAUSING)])
def test_nothing_is_admitted_from_begin_to_the_last_verification(in_flight: str, phase: Phase) -> None:
    machine = cycle(1, in_flight)
    machine.begin("w")
    assert machine.phase is phase
    assert not machine.admits
    machine.quiet(0)
    assert not machine.admits
    machine.updated(0, "w")
    assert (machine.phase, machine.epoch, machine.admits) == (Phase.VERIFYING, 0, False)


def test_a_phase_waits_for_its_last_replica() -> None:
    machine = cycle(3)
    machine.begin("w")
    machine.quiet(0)
    machine.quiet(2)
    assert machine.phase is Phase.DRAINING
    assert machine.waiting_for == {1}


def test_a_refused_reset_fails_and_names_the_replica() -> None:
    machine = cycle()
    machine.begin("w")
    for replica in (0, 1):
        machine.quiet(replica)
    for replica in (0, 1):
        machine.updated(replica, "w")
    machine.verified(0, kv_reset=True)
    machine.verified(1, kv_reset=False)
    assert machine.phase is Phase.FAILED
    assert machine.reason == "replica 1 did not reset its prefix cache"
    assert machine.epoch == 0


def test_other_bytes_than_those_sent_fail() -> None:
    machine = cycle(1)
    machine.begin("sent")
    machine.quiet(0)
    machine.updated(0, "got")
    assert machine.phase is Phase.FAILED
    assert "loaded weights got, not sent" in machine.reason


@pytest.mark.parametrize(("seconds", "phase"), [(9.9, Phase.DRAINING), (10.1, Phase.FAILED)])
def test_a_phase_that_takes_too_long_fails_and_names_who_is_late(seconds: float, phase: Phase) -> None:
    clock = Clock()
    machine = cycle(clock=clock)
    machine.begin("w")
    machine.quiet(0)
    clock.now = seconds
    machine.check_deadline()
    assert machine.phase is phase
    if phase is Phase.FAILED:
        assert machine.reason == "replica 1 still draining after 10 s"


def test_each_phase_has_a_deadline_of_its_own() -> None:
    clock = Clock()
    machine = cycle(1, clock=clock)
    machine.begin("w")
    clock.now = 9.0
    machine.quiet(0)
    clock.now = 28.0
    machine.check_deadline()
    assert machine.phase is Phase.UPDATING


def test_serving_has_no_deadline() -> None:
    clock = Clock()
    machine = cycle(clock=clock)
    clock.now = 1e9
    machine.check_deadline()
    assert machine.admits


def test_failed_is_final() -> None:
    machine = cycle(1)
    machine.begin("w")
    machine.fail("first")
    machine.fail("second")
    machine.quiet(0)  # a late answer is no news
    assert (machine.phase, machine.reason) == (Phase.FAILED, "first")
    with pytest.raises(RefitError, match="no transition from failed"):
        machine.begin("w2")


@pytest.mark.parametrize(
    "act",
    [
        lambda machine: machine.quiet(0),
        lambda machine: machine.updated(0, ""),
        lambda machine: machine.verified(0, kv_reset=True),
        lambda machine: machine.fail("nothing is at stake"),
    ],
)
def test_reports_while_serving_are_refused(act) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RefitError):
        act(cycle())


def test_a_second_refit_cannot_begin_during_the_first() -> None:
    machine = cycle()
    machine.begin("w")
    with pytest.raises(RefitError):
        machine.begin("w")


def test_a_replica_reports_once_per_phase_and_only_if_it_belongs() -> None:
    machine = cycle()
    machine.begin("w")
    machine.quiet(0)
    for replica in (0, 7):
        with pytest.raises(RefitError):
            machine.quiet(replica)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "quiet", "updated", "verified", "refuse", "tick"]), st.integers(0, 2)
        ),
        max_size=60,
    )
)
def test_under_any_order_of_events_the_epoch_counts_complete_rounds(events: list[tuple[str, int]]) -> None:
    clock = Clock()
    machine = cycle(3, clock=clock)
    rounds, told = 0, set()
    for event, replica in events:
        before = machine.phase
        try:
            if event == "begin":
                machine.begin("w")
            elif event == "quiet":
                machine.quiet(replica)
            elif event == "updated":
                machine.updated(replica, "w")
            elif event == "tick":
                clock.now += 7
                machine.check_deadline()
            else:
                machine.verified(replica, kv_reset=event == "verified")
                if before is Phase.VERIFYING:
                    told.add(replica)
        except RefitError:
            assert machine.phase is before
        if before is Phase.VERIFYING and machine.phase is Phase.SERVING:
            assert told == {0, 1, 2}
            rounds, told = rounds + 1, set()
        assert machine.admits == (machine.phase is Phase.SERVING)
    assert machine.epoch == rounds
