from __future__ import annotations

from nemo_war.routing.admission import Admission, Claim


def claim(name: str, context: int, growth: float = 0.0, shared: int = 0) -> Claim:
    return Claim(name, context, growth, shared)


def admitted(to: Admission, each: Claim, now: float = 0.0, capacity: int = 1000) -> bool:
    """Ask, and claim where there is room."""
    if not to.admits(0, capacity, each, now):
        return False
    to.claim(0, each, now)
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


def test_expected_growth_is_claimed_where_configured() -> None:
    assert [admitted(to, claim(f"t{n}", 100, 800)) for to in [Admission(0.5)] for n in range(3)] == [
        True, True, False,
    ]  # fmt: skip


def test_a_claim_is_held_across_a_tool_call() -> None:
    to = Admission()
    assert admitted(to, claim("t", 900))
    to.idle("t", 950, 0.0, now=1.0)
    assert not admitted(to, claim("u", 100), now=1.5)
    assert admitted(to, claim("t", 980), now=2.0)


def test_a_claim_lapses_when_its_tool_call_lasts_far_longer_than_usual() -> None:
    to = Admission()
    assert admitted(to, claim("t", 900))
    to.idle("t", 900, 0.0, now=0.0)
    assert admitted(to, claim("t", 900), now=1.0)  # tool calls take a second
    to.idle("t", 900, 0.0, now=2.0)
    assert not admitted(to, claim("u", 200), now=9.0)
    assert admitted(to, claim("u", 200), now=11.0)
    assert to.home("t") is None


def test_when_growth_was_underestimated_the_shortest_idle_one_is_paused() -> None:
    to = Admission()
    for name, context in (("short", 200), ("middle", 300), ("long", 400)):
        assert admitted(to, claim(name, context))
        to.idle(name, context, 0.0, now=1.0)
    assert admitted(to, claim("long", 600), now=2.0)
    assert (to.home("short"), to.home("middle"), to.home("long")) == (None, 0, 0)


def test_the_shortest_itself_waits_rather_than_pause_a_longer_one() -> None:
    to = Admission()
    for name, context in (("short", 200), ("long", 700)):
        assert admitted(to, claim(name, context))
        to.idle(name, context, 0.0, now=1.0)
    assert not admitted(to, claim("short", 400), now=2.0)
    assert (to.home("short"), to.home("long")) == (None, 0)


def test_a_running_trajectory_is_never_paused() -> None:
    to = Admission()
    assert admitted(to, claim("running", 300))
    assert admitted(to, claim("t", 600))
    to.idle("t", 600, 0.0, now=1.0)
    assert not admitted(to, claim("t", 800), now=2.0)
    assert to.home("running") == 0


def test_a_move_ends_the_claim_elsewhere() -> None:
    to = Admission()
    assert admitted(to, claim("t", 900))
    to.claim(1, claim("t", 900), 1.0)
    assert admitted(to, claim("u", 900))
    assert to.check_integrity()


def test_a_lost_replica_holds_nothing() -> None:
    to = Admission()
    assert admitted(to, claim("t", 900))
    to.lost(0)
    assert to.home("t") is None
    assert admitted(to, claim("u", 900))
    to.idle("t", 950, 0.0, now=1.0)  # its turn there failed
    assert to.check_integrity()
