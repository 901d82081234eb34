"""Recipes for NeMo-RL, as far as they can be checked without it: our block, names and headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_war.config import WarConfig
from nemo_war.configuration.validation import validate
from tests.recipes import EXEMPLAR, RECIPES, ROOT, commands, header, size

DEFAULTS = WarConfig().model_dump(mode="json")

each = pytest.mark.parametrize("recipe", [EXEMPLAR, *RECIPES], ids=lambda path: path.stem)
each_but_the_exemplar = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


def test_the_exemplar_names_every_key_of_the_block_with_its_default() -> None:
    assert block(EXEMPLAR) == DEFAULTS


def test_every_key_of_the_exemplars_block_has_a_comment() -> None:
    lines = EXEMPLAR.read_text().splitlines()
    ours = lines[lines.index("    war: # workload-aware rollouts") :]
    assert [line for line in ours if " # " not in line] == []


@each
def test_its_block_is_valid(recipe: Path) -> None:
    validate(block(recipe), WarConfig, "policy.generation.war")


@each_but_the_exemplar
def test_it_sets_only_what_differs_from_the_default(recipe: Path) -> None:
    defaults = dict(leaves(DEFAULTS))
    assert [key for key, value in leaves(block(recipe)) if value == defaults[key] and key != "enabled"] == []


@each_but_the_exemplar
def test_its_results_and_logs_go_by_its_name(recipe: Path) -> None:
    config = yaml.safe_load(recipe.read_text())
    assert config["checkpointing"]["checkpoint_dir"] == f"results/{recipe.stem}"
    assert config["logger"]["log_dir"] == f"logs/{recipe.stem}"


@each
def test_its_usage_is_one_command_and_the_same_one_for_slurm(recipe: Path) -> None:
    here, slurm = commands(recipe)
    assert here.startswith("uv run python -m nemo_war.launch examples/")
    assert here.endswith(f" --config $NEMO_WAR_PATH/{recipe.relative_to(ROOT)}")
    assert slurm.startswith(f'COMMAND="{here}" CONTAINER=')
    assert slurm.endswith(" ray.sub")


@each_but_the_exemplar
def test_slurm_is_asked_for_as_many_nodes_as_the_name_says(recipe: Path) -> None:
    assert f" --nodes={size(recipe)[0]} " in commands(recipe)[1]


@each
def test_it_says_that_it_was_not_run(recipe: Path) -> None:
    assert "\nUntested: " in header(recipe)


def block(recipe: Path) -> dict[str, Any]:
    """`policy.generation.war` without what is inherited."""
    return yaml.safe_load(recipe.read_text())["policy"]["generation"]["war"]


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted key."""
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
