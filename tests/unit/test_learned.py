"""What a drafter learned goes to disk and comes back, and then it drafts as if nothing had happened."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from nemo_war import snapshot
from nemo_war.config import StepTimePrior
from nemo_war.errors import UserError
from nemo_war.generation.step_time import StepLoad, StepTimeModel
from nemo_war.snapshot import State
from nemo_war.speculative import learned
from nemo_war.speculative.history import SuffixHistory
from nemo_war.speculative.learned import Tables
from nemo_war.speculative.pricing import DraftPricer
from nemo_war.speculative.replay import Replay, accepted_length
from nemo_war.speculative.workload import Recorded, synthetic_texts

VOCABULARY = 40_000
EPOCHS = 6


def recordings(count: int = 36, length: int = 500) -> list[Recorded]:
    """Trajectories of several turns that copy from each other; every third repeats an earlier one."""
    made = []
    for number, (group, text) in enumerate(
        itertools.islice(synthetic_texts(3, length=length, group=4), count)
    ):
        if number % 3 == 2:
            made.append(replace(made[number // 2], trajectory=f"t{number}", epoch=number * EPOCHS // count))
            continue
        turns = [(text[at : at + 60], text[at + 60 : at + 240]) for at in range(0, length - 100, 240)]
        made.append(Recorded(f"t{number}", group, number * EPOCHS // count, tuple(turns)))
    return made


def fresh(history: SuffixHistory) -> Tables:
    step_time = StepTimeModel(StepTimePrior())
    return Tables(history.calibration, step_time, DraftPricer(step_time))


def watched(history: SuffixHistory) -> list[tuple[np.ndarray, ...]]:
    """All drafts from now on, with their survival."""
    seen: list[tuple[np.ndarray, ...]] = []
    draft = history.draft

    def watch(*arguments: object) -> object:
        drafts = draft(*arguments)  # type: ignore[arg-type]
        seen.append(tuple(each.copy() for each in drafts))
        return drafts

    history.draft = watch  # type: ignore[method-assign, assignment]
    return seen


@pytest.mark.parametrize("done", [1, 12, 23, 35])
def test_a_resumed_history_drafts_exactly_as_one_that_never_stopped(tmp_path: Path, done: int) -> None:
    recorded, stem = recordings(), str(tmp_path / "replica-0")
    straight, resumed = (Replay(0.05, 8, max_tokens=100_000) for _ in range(2))
    straight.run(recorded[:done])
    learned.save(stem, straight.history, fresh(straight.history))
    epoch = recorded[done - 1].epoch
    resumed.history.advance_epoch(epoch)  # as the first refit does
    assert learned.restore(stem, resumed.history, fresh(resumed.history), VOCABULARY) == done
    resumed._epoch = straight._epoch = epoch
    expected, found = watched(straight.history), watched(resumed.history)
    counted = [each.run(recorded[done:]) for each in (straight, resumed)]
    assert sum(each.steps for each in counted[0]) == sum(each.steps for each in counted[1])
    assert len(found) == len(expected) > 0
    for mine, theirs in zip(found, expected, strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(mine, theirs, strict=True))
    resumed.history.check_integrity()


@dataclass
class Rollout:
    """One trajectory on its way, teacher-forced."""

    name: str
    recorded: Recorded
    slot: int = -1
    context: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    turn: int = 0
    at: int = 0
    new: int = 1


def roll_out(history: SuffixHistory, recorded: list[Recorded], epoch: int) -> tuple[int, int]:
    """All at once, a token or an accepted draft each in every engine step; (request steps, drafted)."""
    live = [Rollout(f"step{epoch}/{each.trajectory}", each) for each in recorded]
    steps = drafted = 0
    while live:
        for each in (each for each in live if each.slot < 0):
            prompt, _ = each.recorded.turns[each.turn]
            each.context = np.concatenate([each.context, prompt])
            each.slot = history.begin(each.name, each.recorded.group, epoch, each.context)
            each.at, each.new = 0, 1
        padded = np.zeros((len(live), max(each.new for each in live)), np.int32)
        for row, each in enumerate(live):
            response = each.recorded.turns[each.turn][1]
            padded[row, : each.new] = response[each.at : each.at + each.new]
            each.at += each.new
        slots = np.array([each.slot for each in live], np.int32)
        history.extend(slots, padded, np.array([each.new for each in live], np.int32))
        drafts = history.draft(slots, np.full(len(live), 8, np.int32), epoch)
        for row, each in enumerate(live):
            response = each.recorded.turns[each.turn][1]
            size = int((drafts.survival[row] >= 0.1).sum())
            right = accepted_length(drafts.tokens[row, :size], response[each.at :])
            each.new = min(right + 1, len(response) - each.at)
            steps, drafted = steps + 1, drafted + size
        for each in (each for each in live if each.new == 0):
            history.end(each.slot)
            each.context = np.concatenate([each.context, each.recorded.turns[each.turn][1]])
            each.slot, each.turn = -1, each.turn + 1
        live = [each for each in live if each.slot >= 0 or each.turn < len(each.recorded.turns)]
    return steps, drafted


def test_siblings_at_once_are_drafted_for_as_well_though_their_texts_come_back_one_after_another(
    tmp_path: Path,
) -> None:
    recorded, stem = recordings(count=48), str(tmp_path / "replica-0")
    steps = [recorded[at : at + 8] for at in range(0, 48, 8)] * 2
    straight, resumed = (SuffixHistory(100_000, 8) for _ in range(2))
    for epoch, batch in enumerate(steps[:6]):
        roll_out(straight, batch, epoch)
        straight.advance_epoch(epoch + 1)
    learned.save(stem, straight, fresh(straight))
    learned.restore(stem, resumed, fresh(resumed), VOCABULARY)
    counts = np.zeros((2, 2))
    for epoch, batch in enumerate(steps[6:], start=6):
        for row, each in enumerate((straight, resumed)):
            counts[row] += roll_out(each, batch, epoch)
            each.advance_epoch(epoch + 1)
    tokens = sum(len(response) for batch in steps[6:] for each in batch for _, response in each.turns)
    assert counts[0, 0] < tokens / 3, "with so much history most tokens are drafted"
    assert counts[1] == pytest.approx(counts[0], rel=0.02)


def test_names_epochs_and_marks_of_what_was_sampled_stay_as_they_are(tmp_path: Path) -> None:
    replay, stem = Replay(0.05, 8, max_tokens=100_000), str(tmp_path / "replica-0")
    replay.run(recordings())
    learned.save(stem, replay.history, fresh(replay.history))
    resumed = SuffixHistory(100_000, 8)
    learned.restore(stem, resumed, fresh(resumed), VOCABULARY)
    before, after = replay.history.export_sequences(), resumed.export_sequences()
    assert after.trajectories == before.trajectories
    assert after.groups == before.groups
    for name in ("epochs", "tokens", "sampled", "offsets"):
        assert np.array_equal(getattr(after, name), getattr(before, name))


def experienced() -> Tables:
    """Tables that many outcomes went into."""
    replay = Replay(0.05, 8, max_tokens=100_000)
    replay.run(recordings())
    tables = fresh(replay.history)
    draw = np.random.default_rng(1)
    for _ in range(203):  # the last ones are not solved for yet
        load = StepLoad(*draw.integers(1, 20, 2).tolist(), 1000, int(draw.integers(0, 9)))
        tables.step_time.observe(load, float(draw.uniform(5, 50)))
    for _ in range(20):
        chosen = tables.pricer.choose(
            StepLoad(4, 4), np.full((4, 8), 0.9, np.float32), np.full(4, 8, np.int32), np.zeros(4, bool)
        )
        tables.pricer.settle(int(chosen.sum()), int(chosen.sum() * 0.7))
    return tables


def equal(left: Tables, right: Tables) -> bool:
    mine, theirs = left.state().arrays, right.state().arrays
    return mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_tables_come_back_to_the_bit_and_go_on_alike(tmp_path: Path) -> None:
    tables, other = experienced(), fresh(SuffixHistory(1024, 8))
    path = tmp_path / "x.state"
    snapshot.write(path, tables.state())
    other.restore(snapshot.read(path))
    assert equal(tables, other)
    assert other.step_time.steps == 203
    assert other.pricer.trust == tables.pricer.trust < 1
    load = StepLoad(9, 30, 2000, 12)
    for each in (tables, other):
        each.step_time.observe(load, 33.0)
    assert other.step_time.predict(load) == tables.step_time.predict(load)
    assert other.step_time.doubt(StepLoad(9, 9), 3) == tables.step_time.doubt(StepLoad(9, 9), 3)


def test_what_is_restored_is_a_copy() -> None:
    tables, other = experienced(), fresh(SuffixHistory(1024, 8))
    state = tables.state()
    other.restore(state)
    other.calibration.trust[:] += 1
    other.step_time.observe(StepLoad(1, 1), 1.0)
    assert equal(tables, experienced())
    assert np.array_equal(state.arrays["calibration/trust"], tables.calibration.trust)


def changed(name: str, change: Callable[[np.ndarray], object]) -> State:
    """The state of experienced tables, in which one array is another."""
    state = experienced().state()
    array = state.arrays[name].copy()
    result = change(array)
    return State({**state.arrays, name: array if result is None else np.asarray(result)})


def put(place: object, value: float) -> Callable[[np.ndarray], None]:
    return lambda array: array.__setitem__(place, value)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("calibration/trust", put((0, 0, 0, 1), 0.0)),
        ("calibration/trust", put((0, 0, 0, 0), 1e6)),
        ("calibration/detail", put((5, 0), 2.0)),
        ("calibration/outline", put((5, 1), 1e9)),
        ("calibration/sketch", lambda array: array[:-1]),
        ("calibration/sketch", lambda array: array.astype(np.float64)),
        ("calibration/reliability", put((3, 1), 1e9)),
        ("step_time/gram", put((0, 1), 1e9)),
        ("step_time/gram", lambda array: array * (1 - np.eye(10))),
        ("step_time/moment", lambda array: array[:5]),
        ("step_time/coefficients", lambda array: array.reshape(2, 5)),
        ("step_time/steps", lambda array: np.float64(3)),
        ("pricer/promises", lambda array: array * 0),
        ("pricer/drafting", lambda array: np.int64(2)),
    ],
)
def test_tables_that_make_no_sense_are_refused(
    name: str, change: Callable[[np.ndarray], object], tmp_path: Path
) -> None:
    history = SuffixHistory(1024, 8)
    state, tables, stem = changed(name, change), fresh(history), str(tmp_path / "replica-0")
    with pytest.raises(ValueError, match=name.rpartition("/")[2]):
        tables.restore(state)
    history.save(stem + ".suffixes")
    snapshot.write(Path(stem + ".state"), state)
    for act in (lambda: learned.check(stem), lambda: learned.restore(stem, history, tables, VOCABULARY)):
        with pytest.raises(UserError, match=r"replica-0\.state: malformed .*; remove the checkpoint"):
            act()


def test_a_whole_pair_of_files_passes_the_check_and_half_of_one_does_not(tmp_path: Path) -> None:
    history, stem = SuffixHistory(1024, 8), str(tmp_path / "replica-0")
    learned.save(stem, history, fresh(history))
    learned.check(stem)
    Path(stem + ".suffixes").unlink()
    with pytest.raises(UserError, match=r"suffix history .*replica-0\.suffixes"):
        learned.check(stem)


def test_texts_of_another_model_are_refused(tmp_path: Path) -> None:
    history, stem = SuffixHistory(1024, 8), str(tmp_path / "replica-0")
    history.end(history.begin("t", "g", 0, np.arange(50, dtype=np.int32)))
    learned.save(stem, history, fresh(history))
    other = SuffixHistory(1024, 8)
    with pytest.raises(UserError, match="beyond this model's vocabulary of 40"):
        learned.restore(stem, other, fresh(other), 40)
    assert other.stats().trajectories == 0
