"""NeMo-RL's stock generation and ours, side by side on real engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nemo_rl.models.generation.interfaces import verify_right_padding

from nemo_war.generation.nemo_rl.checkpoints import WarCheckpointManager
from tests.nemo_rl import world

pytestmark = pytest.mark.usefixtures("ray_cluster")

WAR = {"speculative": {"max_draft_tokens": 8}}


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def stock(model_folder: Path, asynchronous: bool) -> Iterator[Any]:
    with world.generation(world.generation_config(model_folder, asynchronous, None)) as made:
        yield made


@pytest.fixture(scope="module")
def war(model_folder: Path, asynchronous: bool) -> Iterator[Any]:
    with world.generation(world.generation_config(model_folder, asynchronous, WAR)) as made:
        yield made


@pytest.fixture(scope="module")
def prompts(model_folder: Path) -> list[list[int]]:
    encode = world.tokenizer(model_folder).encode
    return [encode(f"Count on: {start}, {start + 1}, {start + 2}, ") for start in (1, 11, 101, 5)]


def test_a_configuration_without_war_makes_nemo_rls_own(stock: Any, war: Any) -> None:
    assert type(stock) is world.STOCK
    assert isinstance(war, world.STOCK)
    assert type(war) is not world.STOCK


def test_greedy_answers_are_equal_and_right_padded(stock: Any, war: Any, prompts: list[list[int]]) -> None:
    for _ in range(2):  # the second time there are drafts
        for theirs, ours in zip(
            world.answered(stock, prompts, greedy=True),
            world.answered(war, prompts, greedy=True),
            strict=True,
        ):
            assert world.text(ours) == world.text(theirs)
            torch.testing.assert_close(
                torch.tensor(world.new(ours)[1]), torch.tensor(world.new(theirs)[1]), atol=1e-3, rtol=0
            )
            verify_right_padding(ours, pad_value=war.cfg["_pad_token_id"])
            assert ours.keys() == theirs.keys()
    statistics = war.fleet.ask_all("statistics")
    assert sum(each["drafts"] for each in statistics) > 0
    assert sum(each["accepted_tokens"] for each in statistics) > 0


def test_what_was_learned_goes_with_nemo_rls_checkpoints(war: Any, tmp_path: Path) -> None:
    keys = ("metric_name", "higher_is_better", "keep_top_k", "save_period", "save_optimizer")
    config = dict.fromkeys(keys) | {"checkpoint_dir": tmp_path}
    before = history(war)
    assert sum(before) > 0
    checkpoint = WarCheckpointManager(config).init_tmp_checkpoint(1, {})
    war.fleet.ask_all("clear_history")
    assert sum(history(war)) == 0
    with pytest.warns(UserWarning, match="Optimizer state not found"):
        weights, _ = WarCheckpointManager.get_resume_paths(checkpoint)
    assert weights == checkpoint / "policy/weights"
    assert history(war) == before


def history(made: Any) -> list[int]:
    """Tokens remembered by each replica."""
    return [each["history_tokens"] for each in made.fleet.ask_all("statistics")]
