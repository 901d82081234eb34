"""NeMo-RL's `grpo.setup` makes our generation, as far as that goes without a GPU: up to the policy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

import pytest
from nemo_rl.algorithms import grpo
from nemo_rl.models.generation import configure_generation_config
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
from omegaconf import OmegaConf

from nemo_war.generation.nemo_rl.generation import WarGeneration, living
from tests.nemo_rl import world

pytestmark = pytest.mark.usefixtures("ray_cluster")


class NeedsCudaError(Exception):
    """Raised where NeMo-RL would go on with a policy on GPUs."""


class NoPolicy:
    """Stands where the policy would; whatever is asked of it needs a GPU."""

    def __init__(self, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> NoReturn:
        raise NeedsCudaError(name)


class Dataset:
    """Eight prompts that nobody reads."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"idx": index}


def test_setup_makes_our_generation_with_its_engines_running(model_folder: Path, tmp_path: Path) -> None:
    config = master_config(model_folder, tmp_path)
    with world.on_cpu(), pytest.raises(NeedsCudaError) as raised:
        grpo.setup(
            config,
            world.tokenizer(model_folder),
            Dataset(),
            None,
            policy_factory=NoPolicy,
        )
    [made] = living  # as long as its frames are: it shuts down when it is collected
    assert raised.traceback
    try:
        assert isinstance(made, WarGeneration)
        prompt = world.tokenizer(model_folder).encode("Count on: 1, 2, 3, ")
        assert world.new(world.answered(made, [prompt])[0])[0]
        assert {"war/active", "war/turns"} <= made.get_step_metrics().keys()
    finally:
        made.shutdown()


def master_config(model: Path, folder: Path) -> grpo.MasterConfig:
    """NeMo-RL's exemplar with our block, on two logical GPUs, one of them for an engine."""
    register_omegaconf_resolvers()
    exemplar = Path(os.environ["NEMO_RL_PATH"]) / "examples/configs/grpo_math_1B.yaml"
    config = OmegaConf.to_container(load_config(exemplar), resolve=True)
    config["policy"]["model_name"] = str(model)
    config["grpo"] |= {"num_prompts_per_step": 2, "val_period": 0, "val_at_start": False, "val_at_end": False}
    config["checkpointing"] |= {"enabled": False, "checkpoint_dir": str(folder / "checkpoints")}
    config["logger"] |= {"log_dir": str(folder / "logs"), "wandb_enabled": False, "monitor_gpus": False}
    config["logger"]["tensorboard_enabled"] = False
    config["cluster"] |= {"gpus_per_node": 2, "num_nodes": 1}
    generation = world.generation_config(model, True, {"speculative": {"max_draft_tokens": 8}})
    generation["colocated"] |= {"resources": {"gpus_per_node": 1, "num_nodes": None}}
    config["policy"]["generation"] = configure_generation_config(generation, world.tokenizer(model))
    return grpo.MasterConfig(**config)
