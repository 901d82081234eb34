"""A trainer that stopped and went on is, to the bit, one that never stopped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from tiny_model import write_tiny_model

from nemo_war.errors import UserError
from nemo_war.generation.embedded.policy_logprobs import Sample
from nemo_war.generation.embedded.trainer import OPTIMIZER, WEIGHTS, Trainer, TrainerConfig

CONFIG = TrainerConfig(lr=1e-3, weight_decay=0.1)
UPDATES = 6


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[True, False], ids=["tied", "untied"], scope="module")
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), tied=request.param)


def batch(seed: int, rewards: tuple[float, ...] = (1.0, 0.0, 0.0, 0.5)) -> list[Sample]:
    draw = np.random.default_rng(seed)
    made = []
    for reward in rewards:
        length = int(draw.integers(9, 30))
        generated = [at >= length // 3 for at in range(length)]
        made.append(
            Sample(draw.integers(0, 64, length).tolist(), generated, [-4.0] * length, reward, f"g{seed}")
        )
    return made


def bits(trainer: Trainer) -> dict[str, bytes]:
    """Everything that the next update depends on."""
    found = {name: master.numpy().tobytes() for name, master in trainer._masters.items()}
    for name, master in trainer._masters.items():
        for moment, value in trainer._optimizer.state.get(master, {}).items():
            found[f"{name}.{moment}"] = value.numpy().tobytes()
    return found


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("done", [0, 1, 4])
def test_updates_before_and_after_a_restart_are_those_of_one_go(
    model_dir: Path, tmp_path: Path, precision: str, done: int
) -> None:
    config = replace(CONFIG, precision=precision)
    straight, first = Trainer(model_dir, config), Trainer(model_dir, config)
    stats = [straight.update(batch(number)) for number in range(UPDATES)]
    for number in range(done):
        first.update(batch(number))
    first.save(tmp_path)
    saved = bits(first)
    resumed = Trainer(model_dir, config)
    resumed.update(batch(99))  # what was there before must not matter
    resumed.load(tmp_path)
    assert bits(resumed) == saved
    assert resumed.state_bytes() == first.state_bytes()
    for number in range(done, UPDATES):
        found = resumed.update(batch(number))
        assert replace(found, seconds=0.0) == replace(stats[number], seconds=0.0)
    assert bits(resumed) == bits(straight)


def test_going_on_changes_neither_the_files_nor_depends_on_them_any_more(
    model_dir: Path, tmp_path: Path
) -> None:
    trainer = Trainer(model_dir, CONFIG)
    trainer.update(batch(0))
    trainer.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    resumed = Trainer(model_dir, CONFIG)
    resumed.load(tmp_path)
    resumed.update(batch(1))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    other = Trainer(model_dir, CONFIG)
    other.load(tmp_path)
    for name in (WEIGHTS, OPTIMIZER):
        (tmp_path / name).write_bytes(bytes(len(before[name])))
    other.update(batch(1))
    assert bits(other) == bits(resumed)


def test_settings_are_those_of_the_recipe_that_goes_on(model_dir: Path, tmp_path: Path) -> None:
    trainer = Trainer(model_dir, CONFIG)
    trainer.update(batch(0))
    trainer.save(tmp_path)
    resumed = Trainer(model_dir, replace(CONFIG, lr=0.0))
    resumed.load(tmp_path)
    resumed.update(batch(1))
    assert resumed.state_bytes() == trainer.state_bytes()


@pytest.fixture
def saved(model_dir: Path, tmp_path: Path) -> Path:
    trainer = Trainer(model_dir, CONFIG)
    trainer.update(batch(0))
    trainer.save(tmp_path)
    return tmp_path


def refused(model_dir: Path, folder: Path, says: str) -> None:
    trainer = Trainer(model_dir, CONFIG)
    before = bits(trainer)
    with pytest.raises(UserError, match=says) as caught:
        trainer.load(folder)
    assert "\n" not in str(caught.value)
    assert bits(trainer) == before


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER])
def test_a_file_that_is_missing_cut_or_foreign_is_refused(model_dir: Path, saved: Path, name: str) -> None:
    content = (saved / name).read_bytes()
    for damaged in (b"", content[:100], content[:-1], b"PK\x03\x04" + content):
        (saved / name).write_bytes(damaged)
        refused(model_dir, saved, f"{name} cannot be read")
    (saved / name).unlink()
    refused(model_dir, saved, f"{name} cannot be read")


def test_a_safetensors_file_that_we_did_not_write_is_refused(model_dir: Path, saved: Path) -> None:
    safetensors.torch.save_file(safetensors.torch.load_file(saved / WEIGHTS), saved / WEIGHTS)
    refused(model_dir, saved, "not written by this version")


@pytest.mark.parametrize(
    ("changes", "says"), [({"num_hidden_layers": 3}, "do not both have model"), ({"vocab_size": 65}, "shape")]
)
def test_another_model_is_refused(
    model_dir: Path, saved: Path, tmp_path_factory: pytest.TempPathFactory, changes: dict[str, int], says: str
) -> None:
    tied = "lm_head.weight" not in safetensors.torch.load_file(model_dir / "model.safetensors")
    other = write_tiny_model(tmp_path_factory.mktemp("other"), tied=tied, **changes)
    refused(other, saved, f"{says}.*; set policy.model_name")


def test_a_disk_that_is_full_is_an_os_error(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(OSError, match=r"weights\.safetensors: I/O error: No space left"):
        Trainer(model_dir, CONFIG).save(tmp_path)
