from __future__ import annotations

import numpy as np
import pytest

from nemo_war.routing.progress import Progress


def live(of: Progress, name: str, group: str, outputs: list[int], prompt: int = 100, tool: int = 10) -> None:
    """Turns of so many output tokens, each followed by a tool's answer."""
    context = prompt
    for output in outputs:
        of.turn(name, group, context)
        of.answered(name, output)
        context += output + tool


def test_without_examples_it_goes_on_for_as_long_as_it_has_gone() -> None:
    of = Progress()
    live(of, "t", "g", [20, 30])
    of.turn("t", "g", 170)
    left = of.remaining("t", "g")
    assert (left.turns, left.output_tokens) == (2, 50)
    assert left.growth_high > left.growth


def test_a_new_trajectory_without_examples_is_expected_to_need_one_turn() -> None:
    assert Progress().remaining("t", "g").turns == 1


def test_what_remains_is_what_remained_of_those_that_got_so_far() -> None:
    of = Progress()
    for number, turns in enumerate((1, 3, 5)):
        live(of, f"old{number}", f"g{number}", [10] * turns)
        of.end(f"old{number}")
    live(of, "t", "new", [10, 10])
    left = of.remaining("t", "new")
    assert left.turns == pytest.approx((1 + 3) / 2)  # of the two that had a third turn
    assert left.output_tokens == pytest.approx(20)


def test_siblings_tell_more_than_strangers() -> None:
    of = Progress()
    for number in range(4):
        live(of, f"short{number}", "short", [10])
        of.end(f"short{number}")
    live(of, "long", "g", [10] * 9)
    of.end("long")
    assert of.remaining("t", "g").turns > 2 * of.remaining("t", "other").turns


def test_growth_counts_tool_answers_and_the_high_quantile_is_not_below_the_mean() -> None:
    of = Progress()
    for number in range(20):
        live(of, f"old{number}", "g", [10] * (1 + number), tool=90)
        of.end(f"old{number}")
    left = of.remaining("t", "g")
    assert left.growth > 5 * left.output_tokens
    assert left.growth_high > left.growth


def test_a_turn_that_is_considered_again_or_failed_counts_once() -> None:
    of = Progress()
    for _ in range(3):
        of.turn("t", "g", 100)
    of.answered("t", 10)
    of.turn("t", "g", 120)  # fails, and is placed again
    of.turn("t", "g", 120)
    of.answered("t", 10)
    of.end("t")
    assert of.remaining("u", "g").turns == 2


def test_predictions_are_calibrated_on_trajectories_of_a_known_law() -> None:
    random = np.random.default_rng(0)
    of = Progress()
    within, predicted, actual = [], [], []
    for number in range(600):
        turns = int(random.geometric(0.2))
        live(of, f"t{number}", f"g{number}", [])
        if number > 100:
            left = of.remaining(f"t{number}", f"g{number}")
            within.append(10 * turns + 10 * (turns - 1) <= left.growth_high)
            predicted.append(left.turns)
            actual.append(turns)
        live(of, f"t{number}", f"g{number}", [10] * turns)
        of.end(f"t{number}")
    assert np.mean(within) == pytest.approx(0.9, abs=0.04)
    assert np.mean(predicted) == pytest.approx(np.mean(actual), rel=0.1)


def test_memory_is_bounded() -> None:
    of = Progress()
    for number in range(6000):
        live(of, f"t{number}", f"g{number}", [1])
        of.end(f"t{number}")
    assert len(of._siblings) <= 4096
    assert not of._live


def test_a_trajectory_longer_than_any_row_counts_as_one_of_that_length() -> None:
    of = Progress()
    live(of, "endless", "g", [1] * 300)
    of.end("endless")
    live(of, "t", "other", [1] * 200)
    assert of.remaining("t", "other").turns > 0
