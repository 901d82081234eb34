"""The door, where there is no NeMo-RL behind it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nemo_war.launch import main


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text("raise AssertionError('it is not run')")
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--config=None: allowed: a YAML file"),
        (["--config", "recipe.yaml"], "there is no NeMo-RL for this Python: start in NeMo-RL's checkout"),
    ],
)
def test_what_is_missing_is_one_line(
    script: str,
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("nemo_rl", "nemo_rl.utils"):  # a double may have been imported
        monkeypatch.setitem(sys.modules, name, None)
    assert main([script, *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"nemo_war.launch: {says}")
    assert said.count("\n") == 1
