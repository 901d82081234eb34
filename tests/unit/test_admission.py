from __future__ import annotations

import pytest

from nemo_war.routing.admission import Admission, Claim


def claim(name: str, context: int, shared: int = 0) -> Claim:
    return Claim(name, context, shared)


def admitted(
    to: Admission, each: Claim, now: float = 0.0, capacity: int = 1000, keeping_s: float = 1.0
) -> bool:
    """Ask, and claim where there is room."""
    if not to.admits(0, capacity, each, now, keeping_s):
        return False
    to.claim(0, each)
    assert to.check_integrity()
    return True


def test_as_many_are_admitted_as_the_cache_holds() -> None:
    to = Admission()
    assert [admitted(to, claim(f"t{n}", 300)) for n in range(5)] == [True, True, True, False, False]
    to.release("t0")
    assert admitted(to, claim("t3", 300))


def test_an_unknown_capacity_bounds_nothing() -> None:
    to = Admission()
    assert all(admitted(to, claim(f"t{n}", 10**9), capacity=0) for n in range(5))


def test_a_replica_without_claims_takes_one_of_any_size() -> None:
    to = Admission()
    assert admitted(to, claim("t", 5000))
    assert not admitted(to, claim("u", 1))


def test_what_was_there_before_is_not_claimed_again() -> None:
    to = Admission()
    assert admitted(to, claim("first", 800))
    assert all(admitted(to, claim(f"sibling{n}", 850, shared=800)) for n in range(4))
    assert not admitted(to, claim("stranger", 10))


def test_what_was_there_when_it_came_stays_unclaimed_as_it_goes_on() -> None:
    to = Admission()
    assert admitted(to, claim("t", 850, shared=800))
    to.idle("t", 900, now=1.0)
    assert admitted(to, claim("t", 950, shared=900), now=2.0)
    assert admitted(to, claim("u", 850), now=2.0)
    assert not admitted(to, claim("v", 1), now=2.0)


def test_newcomers_leave_free_what_those_who_are_there_need_to_grow() -> None:
    to = Admission()
    to.headroom.share = 0.2
    assert admitted(to, claim("t", 600))
    assert not admitted(to, claim("u", 201))
    assert admitted(to, claim("u", 200))


def test_one_that_has_a_claim_may_grow_into_what_newcomers_leave_free() -> None:
    to = Admission()
    to.headroom.share = 0.2
    assert admitted(to, claim("t", 600))
    assert admitted(to, claim("u", 200))
    to.idle("t", 700, now=1.0)
    assert admitted(to, claim("t", 800), now=2.0)
    assert to.home("u") == 0


def test_headroom_does_not_keep_one_from_a_replica_without_claims() -> None:
    to = Admission()
    to.headroom.share = 0.3
    assert admitted(to, claim("t", 1000))


def test_a_claim_is_held_across_a_tool_call() -> None:
    to = Admission()
    assert admitted(to, claim("t", 900))
    to.idle("t", 950, now=1.0)
    assert not admitted(to, claim("u", 100), now=1.5)
    assert admitted(to, claim("t", 980), now=2.0)


@pytest.mark.parametrize(("keeping_s", "limit"), [(0.01, 18.0), (0.02, 36.0)])
def test_an_idle_claim_lapses_once_its_room_would_have_served_others_better(
    keeping_s: float, limit: float
) -> None:
    to = Admission()
    assert admitted(to, claim("t", 900))
    to.idle("t", 900, now=5.0)
    assert not admitted(to, claim("u", 200), 5.0 + limit - 0.5, keeping_s=keeping_s)
    assert to.home("t") == 0
    assert admitted(to, claim("u", 200), 5.0 + limit + 0.5, keeping_s=keeping_s)
    assert to.home("t") is None


def test_the_limit_is_that_of_the_mean_claim() -> None:
    to = Admission()
    for name, context in (("long", 800), ("short", 200)):
        assert admitted(to, claim(name, context))
        to.idle(name, context, now=0.0)
    assert not admitted(to, claim("u", 100), now=9.0, keeping_s=0.01)  # 2 * 0.01 * 500 = 10 s
    assert admitted(to, claim("u", 100), now=11.0, keeping_s=0.01)


def test_no_claim_lapses_for_a_newcomer_that_fits() -> None:
    to = Admission()
    assert admitted(to, claim("t", 500))
    to.idle("t", 500, now=0.0)
    assert admitted(to, claim("u", 500), now=1e6, keeping_s=0.01)
    assert to.home("t") == 0


def test_only_claims_that_are_idle_for_too_long_lapse() -> None:
    to = Admission()
    for number in range(3):
        assert admitted(to, claim(f"t{number}", 300))
    for number in (1, 0, 2):
        to.idle(f"t{number}", 300, now={1: 0.0, 0: 50.0, 2: 99.0}[number])
    assert admitted(to, claim("u", 300), now=100.0, keeping_s=0.1)  # 2 * 0.1 * 300 = 60 s
    assert [to.home(f"t{number}") for number in range(3)] == [0, None, 0]


def test_the_claim_of_a_running_turn_never_lapses() -> None:
    to = Admission()
    assert admitted(to, claim("running", 500))
    assert admitted(to, claim("t", 500))
    to.idle("t", 500, now=0.0)
    assert not admitted(to, claim("u", 900), now=1e6, keeping_s=0.01)
    assert (to.home("running"), to.home("t")) == (0, None)
    assert admitted(to, claim("u", 500), now=1e6, keeping_s=0.01)


def test_where_nothing_else_costs_time_a_claim_never_lapses() -> None:
    to = Admission()
    assert admitted(to, claim("t", 900))
    to.idle("t", 900, now=0.0)
    assert not admitted(to, claim("u", 200), now=1e9, keeping_s=float("inf"))


def test_when_growth_was_underestimated_the_shortest_idle_one_is_paused() -> None:
    to = Admission()
    for name, context in (("short", 200), ("middle", 300), ("long", 400)):
        assert admitted(to, claim(name, context))
        to.idle(name, context, now=1.0)
    assert admitted(to, claim("long", 600), now=2.0)
    assert (to.home("short"), to.home("middle"), to.home("long")) == (None, 0, 0)


def test_the_shortest_itself_waits_rather_than_pause_a_longer_one() -> None:
    to = Admission()
    for name, context in (("short", 200), ("long", 700)):
        assert admitted(to, claim(name, context))
        to.idle(name, context, now=1.0)
    assert not admitted(to, claim("short", 400), now=2.0)
    assert (to.home("short"), to.home("long")) == (None, 0)


def test_nobody_is_paused_where_that_would_not_make_enough_room() -> None:
    to = Admission()
    for name, context in (("running", 700), ("short", 100), ("t", 150)):
        assert admitted(to, claim(name, context))
    to.idle("short", 100, now=1.0)
    to.idle("t", 150, now=1.0)
    assert not admitted(to, claim("t", 400), now=2.0)
    assert (to.home("short"), to.home("t")) == (0, None)


def test_a_running_trajectory_is_never_paused() -> None:
    to = Admission()
    assert admitted(to, claim("running", 300))
    assert admitted(to, claim("t", 600))
    to.idle("t", 600, now=1.0)
    assert not admitted(to, claim("t", 800), now=2.0)
    assert to.home("running") == 0


def test_a_move_ends_the_claim_elsewhere() -> None:
    to = Admission()
    assert admitted(to, claim("t", 900))
    to.claim(1, claim("t", 900))
    assert admitted(to, claim("u", 900))
    assert to.home("t") == 1


def test_a_lost_replica_holds_nothing() -> None:
    to = Admission()
    assert admitted(to, claim("t", 900))
    to.lost(0)
    assert to.home("t") is None
    assert admitted(to, claim("u", 900))
    to.idle("t", 950, now=1.0)  # its turn there failed
    assert to.check_integrity()


def test_a_context_is_that_of_the_claim() -> None:
    to = Admission()
    assert admitted(to, claim("t", 900, shared=300))
    to.idle("t", 950, now=1.0)
    assert (to.context("t"), to.context("u")) == (950, 0)
