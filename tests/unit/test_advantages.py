from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_war.generation.embedded.advantages import advantages


def test_the_baseline_is_the_mean_of_the_group() -> None:
    assert advantages([1, 0, 0, 1], ["a"] * 4, False, False).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_leave_one_out_compares_with_the_siblings_only() -> None:
    got = advantages([3, 0, 0], ["a"] * 3, False, True)
    assert got == pytest.approx([3.0, -1.5, -1.5])


def test_normalised_advantages_are_divided_by_the_corrected_deviation() -> None:
    got = advantages([1, 2, 3, 6], ["a"] * 4, True, False)
    deviation = np.std([1, 2, 3, 6], ddof=1)
    assert got == pytest.approx((np.array([1, 2, 3, 6]) - 3) / (deviation + 1e-6))


def test_with_leave_one_out_the_deviation_is_that_of_the_siblings() -> None:
    got = advantages([1, 2, 6], ["a"] * 3, True, True)
    assert got[2] == pytest.approx((6 - 1.5) / (np.std([1, 2], ddof=1) + 1e-6))


def test_siblings_that_agree_are_not_divided_by_zero() -> None:
    assert advantages([1, 0, 0], ["a"] * 3, True, True)[0] == 1.0


def test_groups_do_not_mix() -> None:
    got = advantages([1, 10, 0, 20], ["a", "b", "a", "b"], False, False)
    assert got.tolist() == [0.5, -5.0, -0.5, 5.0]


def test_equal_rewards_give_exactly_zero() -> None:
    assert advantages([0.1] * 3, ["a"] * 3, True, True).tolist() == [0.0, 0.0, 0.0]


def test_a_trajectory_without_siblings_has_nothing_to_be_compared_with() -> None:
    assert advantages([5.0], ["a"], True, True).tolist() == [0.0]


def test_rewards_and_groups_must_be_equally_many() -> None:
    with pytest.raises(ValueError, match="2 rewards for 1 groups"):
        advantages([1, 2], ["a"], True, True)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8), st.booleans())
def test_without_normalising_a_groups_advantages_sum_to_zero(
    rewards: list[float], leave_one_out: bool
) -> None:
    assert advantages(rewards, ["a"] * len(rewards), False, leave_one_out).sum() == pytest.approx(0, abs=1e-9)
