from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_war.generation.embedded.advantages import advantages


def nemo_rl(rewards: list[float], normalize: bool, leave_one_out: bool) -> np.ndarray:
    """NeMo-RL's `calculate_baseline_and_std_per_prompt` and division, for one group."""
    values = np.array(rewards)
    mask = np.ones((len(values), len(values))) - np.eye(len(values)) * leave_one_out
    valid = len(values) - int(leave_one_out)
    baseline = mask @ values / valid
    square = mask @ values**2 / valid
    std = np.sqrt(np.maximum((square - baseline**2) * (valid / (valid - 1)), 0.0))
    result = values - baseline
    return np.where(normalize & (std > 1e-6), result / (std + 1e-6), result)


def test_plain_advantages_are_rewards_less_the_group_mean() -> None:
    result = advantages([1.0, 0.0, 0.5, 0.5], ["a"] * 4, normalize=False, leave_one_out=False)
    assert result.tolist() == [0.5, -0.5, 0.0, 0.0]


def test_leave_one_out_compares_with_the_siblings_only() -> None:
    result = advantages([1.0, 0.0, 0.5], ["a"] * 3, normalize=False, leave_one_out=True)
    assert result == pytest.approx([0.75, -0.75, 0.0])


def test_normalized_advantages_divide_by_the_corrected_deviation() -> None:
    result = advantages([1.0, 0.0, 0.0, 1.0], ["a"] * 4, normalize=True, leave_one_out=False)
    deviation = np.sqrt(4 * 0.25 / 3)
    assert result == pytest.approx([0.5 / (deviation + 1e-6) * sign for sign in (1, -1, -1, 1)], rel=1e-12)


def test_judges_that_agree_leave_the_advantage_undivided() -> None:
    result = advantages([1.0, 0.1, 0.1, 0.1], ["a"] * 4, normalize=True, leave_one_out=True)
    assert result[0] == pytest.approx(0.9)
    assert result[1:] == pytest.approx([-0.3 / (np.std([1.0, 0.1, 0.1], ddof=1) + 1e-6)] * 3)


def test_groups_are_judged_apart_and_in_any_order() -> None:
    mixed = advantages([1.0, 5.0, 0.0, 7.0], ["a", "b", "a", "b"], normalize=False, leave_one_out=True)
    assert mixed.tolist() == [1.0, -2.0, -1.0, 2.0]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_equal_rewards_and_single_trajectories_have_exactly_no_advantage(
    normalize: bool, leave_one_out: bool
) -> None:
    result = advantages([0.1, 0.1, 0.1, 0.7], ["a", "a", "a", "alone"], normalize, leave_one_out)
    assert result.tolist() == [0.0] * 4


@given(rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=8), leave_one_out=st.booleans())
def test_plain_advantages_of_a_group_sum_to_zero(rewards: list[float], leave_one_out: bool) -> None:
    total = advantages(rewards, ["a"] * len(rewards), False, leave_one_out).sum()
    assert total == pytest.approx(0, abs=1e-9)


def test_rewards_without_a_group_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rewards for 1 groups"):
        advantages([1.0, 2.0], ["a"], normalize=True, leave_one_out=True)


@given(
    rewards=st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), min_size=3, max_size=8),
    normalize=st.booleans(),
    leave_one_out=st.booleans(),
)
def test_advantages_are_those_of_nemo_rl(rewards: list[float], normalize: bool, leave_one_out: bool) -> None:
    result = advantages(rewards, ["a"] * len(rewards), normalize, leave_one_out)
    assert result == pytest.approx(nemo_rl(rewards, normalize, leave_one_out), abs=1e-6)
