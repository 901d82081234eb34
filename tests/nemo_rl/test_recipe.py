"""A configuration that cannot be put together is one line, with key, value, what is allowed, and the fix."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nemo_war.errors import ConfigError
from nemo_war.generation.nemo_rl.recipe import generation_of, load
from tests.recipes import RECIPES

STOCK = f"{os.environ.get('NEMO_RL_PATH')}/examples/configs/grpo_math_1B.yaml"


def test_it_is_what_nemo_rls_scripts_make_of_file_and_overrides() -> None:
    config = load(["--config", STOCK, "grpo.num_prompts_per_step=7", "++policy.generation.war.enabled=true"])
    assert config["grpo"]["num_prompts_per_step"] == 7
    assert generation_of(config)["war"] == {"enabled": True}


def test_a_variable_that_is_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEMO_RL_PATH", raising=False)
    with pytest.raises(ConfigError) as caught:
        load(["--config", str(RECIPES[0])])
    assert str(caught.value) == (
        "defaults='${oc.env:NEMO_RL_PATH}': allowed: a variable that is exported, and NEMO_RL_PATH is not; "
        "export NEMO_RL_PATH=... before"
    )


def test_a_variable_of_a_key_deep_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOT_THERE", raising=False)
    path = tmp_path / "recipe.yaml"
    path.write_text("data: {train: {data_path: '${oc.env:NOT_THERE}/train.jsonl'}}")
    assert said(path).startswith("data.train.data_path='${oc.env:NOT_THERE}': ")


def test_a_new_key_without_the_plusses() -> None:
    assert said(STOCK, "policy.generation.war.enabled=true").endswith(
        "allowed: keys that the recipe has; a new one needs ++; write ++policy.generation.war.enabled=true"
    )


def test_an_override_that_is_none() -> None:
    assert said(STOCK, "grpo.seed").startswith("overrides='grpo.seed': allowed: KEY=VALUE")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "--config="),
        ("defaults: gone.yaml", "defaults="),
        ("a: [1", "--config="),
        ("a: ${b.c}", "a="),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "recipe.yaml"
    if text is not None:
        path.write_text(text)
    assert said(path).startswith(says)


def said(path: str | Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(["--config", str(path), *overrides])
    line = str(caught.value)
    assert "\n" not in line
    assert "allowed: " in line
    return line
