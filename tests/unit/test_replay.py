"""Teacher forcing on recordings whose outcome is known."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_war.speculative.replay import Replay, accepted_length, goodput
from nemo_war.speculative.workload import Recorded

PROMPT = np.array([1, 2, 3], np.int32)
RESPONSE = np.random.default_rng(0).permutation(1000)[:200].astype(np.int32) + 10


def attempt(number: int, response: np.ndarray = RESPONSE) -> Recorded:
    return Recorded(f"t{number}", "g", number, ((PROMPT, response),))


def test_without_history_nothing_repeats_and_every_step_commits_one_token():
    (first,) = Replay(0.3, 8).run([attempt(0)])
    assert (first.steps, first.drafted, first.tokens) == (199, 0, 199)


def test_a_second_attempt_that_says_the_same_is_drafted_from_the_first():
    replay = Replay(0.3, 8)
    _, second, third = replay.run([attempt(0), attempt(1), attempt(2)])
    assert second.steps < 60
    assert third.steps <= second.steps
    assert second.accepted.sum() > 0.9 * second.drafted


def test_without_keeping_history_the_second_attempt_is_as_slow_as_the_first():
    first, second = Replay(0.3, 8, keep_history=False).run([attempt(0), attempt(1)])
    assert second.steps == first.steps


def test_counts_by_position_add_up():
    other = RESPONSE.copy()
    other[::10] = 5
    replayed = Replay(0.05, 8).run([attempt(0), attempt(1, other), attempt(2, other)])
    for each in replayed:
        assert each.steps + each.accepted.sum() - each.tokens in (0, 1)  # the last token may be a draft's
        assert (each.accepted <= each.verified).all()
        assert (np.diff(each.verified) <= 0).all()
        assert (each.verified[1:] <= each.accepted[:-1]).all()


def test_a_response_of_one_token_takes_no_step():
    (only,) = Replay(0.3, 8).run([attempt(0, RESPONSE[:1])])
    assert (only.steps, only.tokens) == (0, 0)


def test_a_higher_price_verifies_less():
    noisy = [attempt(n, np.where(np.random.default_rng(n).random(200) < 0.2, 7, RESPONSE)) for n in range(5)]
    drafted = [sum(each.drafted for each in Replay(price, 8).run(noisy)) for price in (0.02, 0.3, 0.9)]
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[0] > drafted[2]


@pytest.mark.parametrize(
    ("draft", "rest", "length"), [([], [1], 0), ([1], [], 0), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2)]
)
def test_the_accepted_length_is_that_of_the_common_prefix(draft, rest, length):
    assert accepted_length(np.array(draft, np.int32), np.array(rest, np.int32)) == length


def test_goodput_is_one_without_drafts_and_falls_with_their_cost():
    assert goodput(10, 0, 10, 0.2) == 1
    assert goodput(10, 40, 30, 0.01) == pytest.approx(30 / 10.4)
    assert goodput(0, 0, 0, 0.1) == 0
