from __future__ import annotations

import pytest

from nemo_war.routing.headroom import Headroom

STEP_S = 0.01999
"""A thousand such steps, in whose time it is measured, are a little less than 20 s."""


def shares(share: float, windows: int, *, every_s: float = 20.0, replicas: int = 1) -> list[float]:
    """The headroom after each window in which this share of one replica's time was computed again."""
    of, found = Headroom(), []
    of.recomputed(0.0, replicas, STEP_S, 0.0)
    for window in range(windows):
        for part in range(1, round(20.0 / every_s) + 1):
            of.recomputed(share * every_s, replicas, STEP_S, 20.0 * window + every_s * part)
        found.append(of.share)
    return found


def test_nothing_is_kept_free_where_nothing_is_computed_again() -> None:
    assert shares(0.0, 5) == [0.0] * 5


def test_a_bearable_share_changes_nothing() -> None:
    assert shares(0.09, 5) == [0.0] * 5


def test_it_grows_by_half_of_what_is_not_bearable_up_to_a_bound() -> None:
    assert shares(0.3, 5) == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3])


def test_it_does_not_change_within_a_window() -> None:
    of = Headroom()
    for second in range(20):
        of.recomputed(1.0, 1, STEP_S, float(second))
        assert of.share == 0.0
    of.recomputed(1.0, 1, STEP_S, 20.0)
    assert of.share == 0.3


def test_it_falls_back_when_that_stops() -> None:
    of = Headroom()
    of.recomputed(0.0, 1, STEP_S, 0.0)
    of.recomputed(20.0, 1, STEP_S, 20.0)
    found = []
    for window in range(2, 10):
        of.recomputed(0.0, 1, STEP_S, 20.0 * window)
        found.append(of.share)
    assert found == pytest.approx([0.25, 0.2, 0.15, 0.1, 0.05, 0.0, 0.0, 0.0], abs=1e-12)


@pytest.mark.parametrize("every_s", [0.5, 1.0, 5.0, 10.0])
def test_how_often_it_is_told_makes_no_difference(every_s: float) -> None:
    assert shares(0.2, 4, every_s=every_s) == pytest.approx(shares(0.2, 4))


def test_one_of_four_replicas_that_does_nothing_else_is_a_quarter_of_their_time() -> None:
    assert shares(1.0, 3, replicas=4) == pytest.approx(shares(0.25, 3))


def test_it_is_measured_for_longer_where_steps_take_longer() -> None:
    of = Headroom()
    of.recomputed(0.0, 1, 1.0, 0.0)
    of.recomputed(400.0, 1, 1.0, 990.0)
    assert of.share == 0.0
    of.recomputed(5.0, 1, 1.0, 1010.0)
    assert of.share == pytest.approx(0.5 * (405 / 1010 - 0.1))
