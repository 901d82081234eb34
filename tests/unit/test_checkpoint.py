"""Checkpoints are whole or not there, and only a run's own are gone on from."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_war.config import StepTimePrior
from nemo_war.errors import ConfigError, UserError
from nemo_war.generation.embedded import training_info
from nemo_war.generation.embedded.checkpoint import (
    POLICY,
    WAR,
    Checkpoint,
    Checkpoints,
    NotSavedError,
    restore_policy,
    save_policy,
)
from nemo_war.generation.embedded.config import RunConfig
from nemo_war.generation.embedded.job import run
from nemo_war.generation.embedded.training_info import TrainingInfo
from nemo_war.generation.step_time import StepTimeModel
from nemo_war.routing.sticky import Sticky
from nemo_war.routing.workload_aware import WorkloadAware
from nemo_war.speculative import learned
from nemo_war.speculative.history import SuffixHistory
from nemo_war.speculative.learned import Tables
from nemo_war.speculative.pricing import DraftPricer

ROOT = Path(__file__).parents[2]
EXEMPLAR = ROOT / "examples/configs/grpo_embedded_cpu.yaml"


def config(folder: Path, *overrides: str) -> RunConfig:
    own = ["checkpointing.enabled=true", f"checkpointing.checkpoint_dir={folder}", "grpo.max_num_steps=9"]
    return RunConfig.load(EXEMPLAR, [*own, *overrides])


def fill(folder: Path, seed: int = 0) -> None:
    """What a run of one replica puts into a checkpoint, smaller."""
    for name in ("weights", "optimizer"):
        (folder / POLICY / f"{name}.safetensors").write_bytes(np.random.default_rng(seed).bytes(300))
    history = SuffixHistory(1024, 4)
    history.end(history.begin("t", "g", 0, np.arange(100, dtype=np.int32)))
    step_time = StepTimeModel(StepTimePrior())
    learned.save(
        str(folder / WAR / "replica-0"),
        history,
        Tables(history.calibration, step_time, DraftPricer(step_time)),
    )
    save_policy(folder / WAR, WorkloadAware().state())


def save(folder: Path, step: int, *overrides: str) -> None:
    of = config(folder, *overrides)
    with Checkpoints(of).new(TrainingInfo.of(of, step, step + 1, f"digest {step}")) as draft:
        fill(draft, step)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def latest(folder: Path, *overrides: str) -> Checkpoint:
    found = Checkpoints(config(folder, *overrides)).latest()
    assert found is not None
    return found


def test_what_is_saved_is_found_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    save(tmp_path, 2)
    found = latest(tmp_path)
    assert found.folder == tmp_path / "step_2"
    info = found.info
    assert (info.step, info.epoch, info.consumed_samples, info.seed) == (2, 3, 6, 42)
    assert info.weights_digest == "digest 2"
    assert sorted(info.files) == [
        "policy/optimizer.safetensors", "policy/weights.safetensors",
        "war/replica-0.state", "war/replica-0.suffixes", "war/scheduler.state",
    ]  # fmt: skip
    assert stat.S_IMODE(os.stat(found.folder).st_mode) == 0o700, "texts of a run are its owner's"


def test_the_latest_is_found_by_number_and_other_names_are_nobodys(tmp_path: Path) -> None:
    for step in (1, 9, 10):
        save(tmp_path, step, "grpo.max_num_steps=20", "checkpointing.keep_top_k=null")
    (tmp_path / "step_99").write_text("a file")
    for name in ("tmp_step_11", "step_012", "step_", "step_13x", "notes"):
        (tmp_path / name).mkdir()
    assert latest(tmp_path, "grpo.max_num_steps=20").info.step == 10


def test_without_any_there_is_none_and_the_folder_is_made(tmp_path: Path) -> None:
    assert Checkpoints(config(tmp_path / "a" / "b")).latest() is None
    assert (tmp_path / "a" / "b").is_dir()


def test_a_place_where_none_can_be_is_refused_before_the_run_begins(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="cannot hold checkpoints: "):
            Checkpoints(config(folder)).latest()


@pytest.mark.parametrize(("period", "due"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (7, [7]), (50, [7])])
def test_one_is_due_every_so_many_steps_and_at_the_end(tmp_path: Path, period: int, due: list[int]) -> None:
    of = Checkpoints(config(tmp_path, f"checkpointing.save_period={period}", "grpo.max_num_steps=7"))
    assert [done for done in range(1, 8) if of.due(done)] == due


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [5]), (2, [4, 5]), (5, [1, 2, 3, 4, 5]), ("null", [1, 2, 3, 4, 5])]
)
def test_the_oldest_go_when_there_are_more_than_are_kept(
    tmp_path: Path, keep: int | str, left: list[int]
) -> None:
    for step in range(1, 6):
        save(tmp_path, step, f"checkpointing.keep_top_k={keep}")
    assert names(tmp_path) == [f"step_{step}" for step in left]


def test_one_that_cannot_be_removed_does_not_stop_the_run_and_goes_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    real = shutil.rmtree

    def fail(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.EBUSY, "busy")
        real(path, ignore_errors=True)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail)
        save(tmp_path, 2, "checkpointing.keep_top_k=1")
    assert latest(tmp_path).info.step == 2
    save(tmp_path, 3, "checkpointing.keep_top_k=1")
    assert names(tmp_path) == ["step_3"]


def disk_full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("what", ["rename", "sync", "info"])
@pytest.mark.parametrize("happens", [disk_full, killed])
def test_whatever_stops_a_save_leaves_the_old_one_usable_and_nothing_partial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, happens: Callable[..., None]
) -> None:
    save(tmp_path, 1)
    before = latest(tmp_path)
    real = os.replace

    def replace(source: object, target: object) -> None:  # files have their turn, the folder has not
        return happens() if Path(str(source)).is_dir() else real(source, target)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        if what == "rename":
            patch.setattr(os, "replace", replace)
        elif what == "sync":
            patch.setattr(os, "fsync", happens)
        else:
            patch.setattr(training_info, "write", happens)
        with pytest.raises(NotSavedError if happens is disk_full else KeyboardInterrupt) as caught:
            save(tmp_path, 2)
    if happens is disk_full:
        assert "No space left on device" in str(caught.value)
        assert "step_2 could not be written" in str(caught.value)
    assert names(tmp_path) == ["step_1"]
    assert latest(tmp_path) == before
    save(tmp_path, 2)
    assert latest(tmp_path).info.step == 2


def test_what_a_killed_run_left_unfinished_is_neither_read_nor_kept(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step_1", tmp_path / "tmp_step_2")
    assert latest(tmp_path).info.step == 1
    save(tmp_path, 3)
    assert names(tmp_path) == ["step_1", "step_3"]


@pytest.mark.parametrize("name", ["war/replica-7.state", "policy/notes.txt"])
def test_a_file_that_is_not_its_own_is_refused(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    (tmp_path / "step_1" / name).write_bytes(b"of another run")
    with pytest.raises(UserError, match=f"{name}: not one of the checkpoint's files; remove its folder"):
        latest(tmp_path)
    assert (tmp_path / "step_1" / name).read_bytes() == b"of another run"


def test_one_of_the_same_step_is_not_overwritten(tmp_path: Path) -> None:
    save(tmp_path, 2)
    before = latest(tmp_path)
    with pytest.raises(NotSavedError, match=r"step_2 could not be written: .*not empty"):
        save(tmp_path, 2)
    assert latest(tmp_path) == before


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    save(folder, 2)
    return folder


FILES = [
    "training_info.json", "policy/weights.safetensors", "policy/optimizer.safetensors",
    "war/replica-0.suffixes", "war/replica-0.state", "war/scheduler.state",
]  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.sampled_from(FILES), st.data())
def test_any_flipped_bit_and_any_cut_of_any_file_is_noticed(
    whole: Path, name: str, data: st.DataObject
) -> None:
    path = whole / "step_2" / name
    content = path.read_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    bit = data.draw(st.integers(0, 7) | st.none())
    damaged = (
        content[:at] if bit is None else content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
    )
    path.write_bytes(damaged)
    try:
        with pytest.raises(UserError) as caught:
            latest(whole)
    finally:
        path.write_bytes(content)
    assert str(path) in str(caught.value)
    assert "remove its folder step_N" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert latest(whole).info.step == 2


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    save(tmp_path, 2)
    (tmp_path / "step_2" / name).unlink()
    with pytest.raises(UserError, match=f"{name}: No such file"):
        latest(tmp_path)


def rewrite(folder: Path, **changes: object) -> None:
    """Change what a checkpoint says of itself, its checksum as it should be."""
    info = training_info.read(folder)
    training_info.write(folder, info.model_copy(update=changes))


def test_a_file_of_another_version_is_refused_though_its_digest_is_right(tmp_path: Path) -> None:
    save(tmp_path, 2)
    path = tmp_path / "step_2/war/replica-0.state"
    path.write_bytes(path.read_bytes().replace(b"state 1\n", b"state 2\n", 1))
    files = dict(latest_info(tmp_path).files)
    files["war/replica-0.state"] = training_info.FileFacts(
        size=path.stat().st_size, blake2b=training_info.digest(path)
    )
    rewrite(tmp_path / "step_2", files=files)
    with pytest.raises(UserError, match="format 2, this version reads 1"):
        latest(tmp_path)


def latest_info(folder: Path) -> TrainingInfo:
    return training_info.read(folder / "step_2")


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "policy/../../x", "a\0b", "a\nb"])
def test_it_cannot_name_files_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    save(tmp_path, 2)
    files = {name: training_info.FileFacts(size=0, blake2b="")}
    rewrite(tmp_path / "step_2", files=files)
    with pytest.raises(UserError, match="outside of its folder"):
        latest(tmp_path)


def test_it_cannot_name_what_is_no_file(tmp_path: Path) -> None:
    save(tmp_path, 2)
    os.mkfifo(tmp_path / "step_2/pipe")
    rewrite(tmp_path / "step_2", files={"pipe": training_info.FileFacts(size=0, blake2b="")})
    with pytest.raises(UserError, match="pipe: not a file"):
        latest(tmp_path)


@pytest.mark.parametrize("nested", [{"\ud800": 1}, {"env": "\ud800"}, json.loads("[" * 400 + "]" * 400)])
def test_a_config_that_is_no_text_or_nested_too_deeply_is_refused(tmp_path: Path, nested: object) -> None:
    save(tmp_path, 2)
    path = tmp_path / "step_2/training_info.json"
    fields = json.loads(path.read_text()) | {"config": {"env": nested}}
    path.write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"malformed|checksum"):
        latest(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "damaged, or not a checkpoint's"),
        (b"[" * 100_000, "damaged, or not a checkpoint's"),
        (b"[]", "damaged, or not a checkpoint's"),
        (b"{}", "damaged, or not a checkpoint's"),
        (b'{"step": 2, "consumed_samples": 64}', "damaged, or not a checkpoint's"),  # NeMo-RL's own
        (b'{"format": "x", "version": 1, "checksum": ""}', "not a checkpoint's"),
        (b'{"format": "nemo_war checkpoint", "version": 9, "checksum": ""}', "format 9, .* reads 1"),
        (b'{"format": "nemo_war checkpoint", "version": "\\n", "checksum": ""}', r"format '\\n', .* reads 1"),
        (b'{"format": "nemo_war checkpoint", "version": 1, "checksum": ""}', "malformed"),
        (b" " * (1 << 21), "damaged"),
    ],
)
def test_an_info_that_is_none_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    save(tmp_path, 2)
    (tmp_path / "step_2" / "training_info.json").write_bytes(content)
    with pytest.raises(UserError, match=says):
        latest(tmp_path)


def test_one_that_was_renamed_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / "step_2").rename(tmp_path / "step_3")
    with pytest.raises(UserError, match=r"step_3/training_info\.json: it says step 2"):
        latest(tmp_path)


def test_an_older_one_does_not_silently_stand_in_for_a_damaged_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step_2/policy/weights.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="step_2"):
        latest(tmp_path)
    shutil.rmtree(tmp_path / "step_2")
    assert latest(tmp_path).info.step == 1


@pytest.mark.parametrize(
    ("override", "key", "allowed"),
    [
        ("grpo.seed=43", "grpo.seed", "allowed: 42, as in"),
        ("data.num_prompts=9", "data.num_prompts", "allowed: 6, as in"),
        ("env.calculator=null", "env", "allowed: {"),
        ("grpo.max_num_steps=2", "grpo.max_num_steps", "allowed: above 2"),
    ],
)
def test_another_run_is_told_what_must_be_the_same(
    tmp_path: Path, override: str, key: str, allowed: str
) -> None:
    save(tmp_path, 2)
    with pytest.raises(ConfigError) as caught:
        latest(tmp_path, override)
    assert caught.value.key == key
    assert caught.value.allowed.startswith(allowed)
    assert str(tmp_path / "step_2") in caught.value.allowed
    assert "another checkpointing.checkpoint_dir" in caught.value.fix


def test_what_a_run_may_change_when_it_goes_on(tmp_path: Path) -> None:
    save(tmp_path, 2)
    for override in (
        "grpo.max_num_steps=30", "policy.optimizer.kwargs.lr=1e-7", "cluster.num_replicas=4",
        "policy.generation.war.enabled=false", "checkpointing.save_period=2", "grpo.val_period=1",
    ):  # fmt: skip
        assert latest(tmp_path, override).info.step == 2


def test_a_policy_without_state_writes_none_and_takes_none(tmp_path: Path) -> None:
    save_policy(tmp_path, Sticky().state())
    assert names(tmp_path) == []
    restore_policy(tmp_path, WorkloadAware())
    save_policy(tmp_path, WorkloadAware().state())
    restore_policy(tmp_path, Sticky())


def test_a_state_of_placement_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 2)
    war = tmp_path / "step_2" / "war"
    shutil.copy(war / "replica-0.state", war / "scheduler.state")
    with pytest.raises(UserError, match=r"scheduler\.state: malformed"):
        restore_policy(war, WorkloadAware())


def test_a_comparison_is_not_checkpointed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run(config(tmp_path), compare=True, run_dir=tmp_path / "run")
    assert caught.value.key == "checkpointing.enabled"
    assert "leave --compare out" in caught.value.fix
    assert names(tmp_path) == []


def test_a_checkpoint_that_cannot_be_gone_on_from_is_found_before_anything_starts(tmp_path: Path) -> None:
    save(tmp_path, 2)
    with pytest.raises(ConfigError, match=r"^grpo\.max_num_steps=2"):
        run(config(tmp_path, "grpo.max_num_steps=2"), compare=False, run_dir=tmp_path / "run")
    assert names(tmp_path) == ["step_2"]
