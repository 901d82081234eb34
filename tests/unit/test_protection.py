"""What an embedded run trusts: Ray's token, and no code of a model's folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_war.errors import UserError
from nemo_war.generation.embedded.encoder import encoder
from nemo_war.generation.embedded.protection import protect_ray

ROOT = Path(__file__).parents[2]
NAMES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    kept = {name: os.environ.pop(name, None) for name in NAMES}
    yield
    for name, value in kept.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def test_every_run_has_a_token_of_its_own_for_ray() -> None:
    tokens = set()
    for _ in range(2):
        os.environ.pop("RAY_AUTH_MODE", None)
        protect_ray()
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert re.fullmatch("[0-9a-f]{64}", os.environ["RAY_AUTH_TOKEN"])
        tokens.add(os.environ["RAY_AUTH_TOKEN"])
    assert len(tokens) == 2


def test_what_the_user_has_set_for_ray_stands() -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    protect_ray()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_the_code_of_a_tokenizers_folder_is_not_run_and_nobody_is_asked(tmp_path: Path) -> None:
    named = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError, match="--tokenizer"):
        encoder(tmp_path)("text")
    assert not (tmp_path / "ran").exists()


def test_nothing_here_unpickles_or_trusts_a_models_code() -> None:
    """Ray pickles what goes between processes of one user; no module of ours does, nor lets others."""
    forbidden = re.compile(
        r"^\s*(import|from) (pickle|cloudpickle|dill|marshal|shelve)\b|torch\.load\(|allow_pickle=True|"
        r"trust_remote_code=True|yaml\.(unsafe_)?load\(|(?<![\w.])(eval|exec)\(",
        re.MULTILINE,
    )
    modules = list((ROOT / "nemo_war").rglob("*.py"))
    assert len(modules) > 100
    assert [str(path) for path in modules if forbidden.search(path.read_text())] == []
    loading = re.compile(r"from_pretrained\(([^()]|\([^()]*\))*\)")
    for path in modules:
        for call in loading.finditer(path.read_text()):
            assert "trust_remote_code=False" in call[0] or "gguf" in call[0], f"{path}: {call[0]}"
