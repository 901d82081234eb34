from __future__ import annotations

import itertools

import numpy as np
import pytest

from nemo_war.routing import progress
from nemo_war.routing.progress import Progress
from nemo_war.snapshot import State


@pytest.fixture(autouse=True)
def _never_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Residual lives that follow from all that was told."""
    monkeypatch.setattr(progress, "_STALE", 1)


def live(of: Progress, name: str, group: str, outputs: list[int]) -> None:
    """Turns of so many output tokens."""
    for output in outputs:
        of.turn(name, group)
        of.answered(name, output)


def whole(of: Progress, name: str, group: str, outputs: list[int]) -> None:
    """A trajectory from its beginning to its end."""
    live(of, name, group, outputs)
    of.end(name)


def test_without_examples_it_goes_on_for_as_long_as_it_has_gone() -> None:
    of = Progress()
    live(of, "t", "g", [20, 30])
    of.turn("t", "g")
    assert of.remaining("t", "g") == pytest.approx((2, 50))


def test_a_new_trajectory_without_examples_is_expected_to_need_one_turn() -> None:
    assert Progress().remaining("t", "g").turns == 1


@pytest.fixture
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was seen is believed as it is, and siblings are as all are."""
    monkeypatch.setattr(progress, "_SMOOTHING", 1e-9)
    monkeypatch.setattr(progress, "_GROUP_PRIOR", 1e12)


@pytest.mark.usefixtures("_plain")
@pytest.mark.parametrize("seed", range(5))
def test_what_remains_is_what_remained_of_those_that_got_so_far(seed: int) -> None:
    of, lengths = Progress(), np.random.default_rng(seed).geometric(0.2, 100)
    for number, turns in enumerate(lengths):
        whole(of, f"old{number}", "g", [10] * turns)
    for done in range(lengths.max()):
        live(of, f"t{done}", "g", [10] * done)
        left = (lengths[lengths > done] - done).mean()
        assert of.remaining(f"t{done}", "g") == pytest.approx((left, 10 * left))


def mean_residual_life(ended: list[int], went_on: list[int], done: int) -> float:
    """By Kaplan and Meier, one turn after another.

    Args:
        ended: after so many turns each.
        went_on: live, and in the turn after so many.
        done: turns of the one in question.
    """
    longest, later = max([*ended, *went_on]), 0.0
    at_risk = {turns: sum(each >= turns for each in [*ended, *went_on]) for turns in range(1, longest + 1)}
    hazard = {turns: ended.count(turns) / at_risk[turns] for turns in at_risk}
    survival = 1.0
    for turns in range(done + 1, longest):
        survival *= 1 - hazard[turns]
        later += survival
    last = min(longest, 1 / hazard[longest]) if hazard[longest] else longest
    return 1 + later + survival * (1 - hazard[longest]) * last if done < longest else last


@pytest.mark.usefixtures("_plain")
@pytest.mark.parametrize("seed", range(10))
def test_live_ones_count_for_as_far_as_they_got(seed: int) -> None:
    random, of = np.random.default_rng(seed), Progress()
    ended, went_on = random.geometric(0.2, 30).tolist(), random.geometric(0.1, 30).tolist()
    for number, turns in enumerate(ended):
        whole(of, f"old{number}", "g", [10] * turns)
    for number, turns in enumerate(went_on):
        live(of, f"live{number}", "g", [10] * turns)
        of.turn(f"live{number}", "g")
    for number, turns in enumerate(went_on):
        wanted = mean_residual_life(ended, went_on, turns)
        assert of.remaining(f"live{number}", "g").turns == pytest.approx(wanted, rel=1e-6)


def test_early_in_a_step_what_ended_first_is_not_taken_for_all() -> None:
    random, of = np.random.default_rng(0), Progress()
    lengths = random.geometric(0.1, 500)
    for number, turns in enumerate(lengths):
        live(of, f"t{number}", f"g{number}", [10] * min(turns, 5))
        if turns <= 5:
            of.end(f"t{number}")
        else:
            of.turn(f"t{number}", f"g{number}")
    assert of.remaining("t", "g").turns > 2 * lengths[lengths <= 5].mean()


def test_siblings_tell_more_than_strangers() -> None:
    of = Progress()
    for number in range(100):
        whole(of, f"old{number}", f"g{number}", [10] * (1 + number % 9))
    for number in range(16):
        whole(of, f"short{number}", "short", [10])
        whole(of, f"long{number}", "long", [10] * 9)
    short, strange, long = (of.remaining("t", group).turns for group in ("short", "?", "long"))
    assert 1 <= short < 0.7 * strange
    assert long > 1.3 * strange
    high = [of.quantile("t", group, 0.9).turns for group in ("short", "?", "long")]
    assert high == sorted(high)
    assert high[0] < high[2]


def test_later_turns_are_as_long_as_its_own_and_while_these_are_few_as_all() -> None:
    of = Progress()
    for number in range(50):
        whole(of, f"old{number}", f"g{number}", [10] * 20)

    def turn_tokens(done: int) -> float:
        live(of, f"t{done}", f"new{done}", [100] * done)
        left = of.remaining(f"t{done}", f"new{done}")
        return left.output_tokens / left.turns

    found = [turn_tokens(done) for done in (0, 1, 4, 16)]
    assert found[0] == 10
    assert found == sorted(found)
    assert 10 < found[1] < 50 < found[3] < 100


def test_a_turn_that_is_considered_again_or_failed_counts_once() -> None:
    of, other = Progress(), Progress()
    for _ in range(3):
        of.turn("t", "g")
    of.answered("t", 10)
    of.turn("t", "g")  # fails, and is placed again
    of.turn("t", "g")
    of.answered("t", 10)
    of.answered("t", 10)  # was not asked for
    of.end("t")
    whole(other, "t", "g", [10, 10])
    assert of.remaining("u", "g") == other.remaining("u", "g")
    assert of.remaining("u", "?") == other.remaining("u", "?")


def test_one_that_ends_without_an_answer_tells_nothing() -> None:
    of = Progress()
    of.turn("t", "g")
    of.end("t")
    of.end("unknown")
    assert of.remaining("u", "g") == Progress().remaining("u", "g")


def test_predictions_are_calibrated_on_groups_that_differ_by_a_factor() -> None:
    within, predicted, actual = [], [], []
    for seed in range(3):
        random, of = np.random.default_rng(seed), Progress()
        for number in range(150):
            hazard = min(1.0, 0.1 * random.gamma(8.0, 1 / 8.0))
            for sibling in range(8):
                name, group, turns = f"t{number} {sibling}", f"g{number}", int(random.geometric(hazard))
                for done in range(turns):
                    of.turn(name, group)
                    if number >= 50:
                        left = (turns - done) * 10
                        within.append(left <= of.quantile(name, group, 0.9).output_tokens + 1e-6)
                        predicted.append(of.remaining(name, group).output_tokens)
                        actual.append(left)
                    of.answered(name, 10)
                of.end(name)
    assert np.mean(within) == pytest.approx(0.9, abs=0.03)
    assert np.mean(predicted) == pytest.approx(np.mean(actual), rel=0.06)


def test_a_higher_quantile_is_no_less_and_no_more_than_every_one_sufficed() -> None:
    of = Progress()
    for number in range(200):
        whole(of, f"old{number}", f"g{number}", [10] * (1 + number % 20))
    found = [of.quantile("t", "g", quantile).turns for quantile in (0.1, 0.5, 0.9, 0.97)]
    assert found == pytest.approx([2, 10, 18, 20], abs=1)


def test_residual_lives_lag_behind_by_no_more_than_a_few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_STALE", 16)
    of = Progress()
    assert of.remaining("t", "?").turns == 1
    for number in range(16):
        whole(of, f"old{number}", f"g{number}", [10] * 5)
    assert of.remaining("t", "?").turns == pytest.approx(5, rel=0.2)


def test_what_was_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_MEMORY", 100)
    of = Progress()
    for number in range(100):
        whole(of, f"old{number}", f"old{number}", [1] * 10)
    before = of.remaining("t", "?").turns
    for number in range(1000):
        whole(of, f"new{number}", f"new{number}", [1] * 2)
    assert before > 8
    assert of.remaining("t", "?").turns < 2.2


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_GROUPS", 100)
    of = Progress()
    for number in range(300):
        whole(of, f"t{number}", f"g{number}", [1])
    assert len(of._groups) == 100
    assert not of._live


def test_a_trajectory_of_more_turns_than_are_told_apart_still_has_some_to_come() -> None:
    of = Progress()
    whole(of, "endless", "g", [1] * 300)
    live(of, "t", "other", [1] * 280)
    assert of.remaining("t", "other").turns >= 1
    assert of.quantile("t", "other", 0.9).turns >= 1


def experienced(seed: int = 0) -> Progress:
    """One that has seen forty groups, and has some trajectories on their way."""
    random, of = np.random.default_rng(seed), Progress()
    for number in range(160):
        whole(of, f"t{number}", f"g{number // 4}", [int(random.integers(1, 90))] * int(random.geometric(0.2)))
    for number in range(5):
        live(of, f"live{number}", f"g{number}", [10] * (number + 1))
        of.turn(f"live{number}", f"g{number}")
    return of


def test_what_was_learned_is_restored_to_the_bit_and_goes_on_alike() -> None:
    before, after = experienced(), Progress()
    after.restore(before.state())
    for group, done in itertools.product(("g0", "g39", "?"), (0, 1, 7, 40)):
        name = f"{group} {done}"
        for each in (before, after):
            live(each, name, group, [10] * done)
        assert after.remaining(name, group) == before.remaining(name, group)
        assert after.quantile(name, group, 0.9) == before.quantile(name, group, 0.9)
    assert list(after._groups) == list(before._groups)


def test_live_trajectories_are_gone_with_their_process_and_what_they_showed_is_not() -> None:
    of = experienced()
    state = of.state()
    assert not [text for texts in state.texts.values() for text in texts if text.startswith("live")]
    after = Progress()
    after.restore(state)
    assert not after._live
    assert after._lives._went_on.sum() == of._lives._went_on.sum()


def test_restoring_forgets_what_was_known_before() -> None:
    of = experienced(1)
    of.restore(Progress().state())
    assert of.remaining("t", "g0") == Progress().remaining("t", "g0")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("all/totals", np.zeros(3), r"totals is float64\[3\]"),
        ("all/totals", np.full(2, 1e300), "totals has a number above"),
        ("all/group_ended", np.zeros(39, np.int64), r"group_ended is int64\[39\], not int64\[40\]"),
        ("all/group_expected", np.zeros(40, np.float32), "group_expected is float32"),
        ("lives/ended", np.full(256, 1e6), "ended has a number above"),
        ("lives/went_on", np.zeros(255), "went_on is"),
    ],
)
def test_a_state_that_makes_no_sense_is_refused_and_changes_nothing(
    name: str, value: np.ndarray, says: str
) -> None:
    of, state = experienced(2), experienced().state()
    before = of.remaining("t", "g0")
    with pytest.raises(ValueError, match=says):
        of.restore(State({**state.arrays, name: value}, state.texts))
    assert of.remaining("t", "g0") == before


def test_groups_that_are_too_many_or_there_twice_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state = experienced().state()
    with pytest.raises(ValueError, match="there twice"):
        Progress().restore(State(state.arrays, {"all/groups": ("g",) * 40}))
    monkeypatch.setattr(progress, "_GROUPS", 39)
    with pytest.raises(ValueError, match="too many"):
        Progress().restore(state)
