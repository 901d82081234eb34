"""NeMo-RL loads every recipe, and its classes and WAR's checks accept it. Nothing is started."""

from __future__ import annotations

import os
import re
from math import prod
from pathlib import Path

import pytest
from nemo_rl.algorithms.grpo import MasterConfig
from nemo_rl.environments.nemo_gym import should_use_nemo_gym
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
from omegaconf import OmegaConf
from vllm import AsyncEngineArgs

from nemo_war.generation.nemo_rl.block import war_of
from tests.recipes import EXEMPLAR, RECIPES, commands, header, size


@pytest.fixture(params=[EXEMPLAR, *RECIPES], ids=lambda path: path.stem)
def recipe(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def config(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> MasterConfig:
    """As NeMo-RL's scripts read it, with what the headers say is to be exported."""
    for each in (recipe, *RECIPES):  # a recipe may inherit from another
        for name in re.findall(r"export (\w+)=\.\.\.", header(each)):
            if name != "NEMO_RL_PATH":
                monkeypatch.setenv(name, f"/{name}")
    register_omegaconf_resolvers()
    return MasterConfig(**OmegaConf.to_container(load_config(recipe), resolve=True))


def test_nemo_rl_and_war_accept_it(config: MasterConfig) -> None:
    assert war_of(config.policy["generation"]).enabled


def test_vllm_accepts_its_engine_arguments(config: MasterConfig, tmp_path: Path) -> None:
    generation = config.policy["generation"]
    arguments = AsyncEngineArgs(model=str(tmp_path), **generation["vllm_kwargs"])
    tokens = 1 + war_of(generation).speculative.max_draft_tokens
    for graph in arguments.compilation_config.cudagraph_capture_sizes or []:
        assert graph % tokens == 0, "vLLM rounds up, and drops what gets larger than the largest"


def test_the_script_that_it_is_for_exists_and_is_gyms_where_gym_is_used(
    recipe: Path, config: MasterConfig
) -> None:
    script = commands(recipe)[0].split()[5]
    assert (Path(os.environ["NEMO_RL_PATH"]) / script).is_file()
    assert ("nemo_gym" in script) == should_use_nemo_gym(config), "which also checks the engine's server"


def test_it_takes_the_nodes_and_gpus_that_its_name_says(recipe: Path, config: MasterConfig) -> None:
    if recipe == EXEMPLAR:
        pytest.skip("is named like the file that it extends")
    assert (config.cluster["num_nodes"], config.cluster["gpus_per_node"]) == size(recipe)


def test_replicas_and_model_copies_come_out_even_on_its_gpus(config: MasterConfig) -> None:
    generation, megatron = config.policy["generation"], config.policy["megatron_cfg"]
    per_node, nodes = config.cluster["gpus_per_node"], config.cluster["num_nodes"]
    apart = 0 if generation["colocated"]["enabled"] else generation["colocated"]["resources"]["num_nodes"]
    kinds = ("tensor_model", "pipeline_model", "context") if megatron["enabled"] else ()
    copy = prod(megatron[f"{kind}_parallel_size"] for kind in kinds)
    assert per_node % generation["vllm_cfg"]["tensor_parallel_size"] == 0, "a replica stays within a node"
    assert nodes > apart
    assert (nodes - apart) * per_node % copy == 0
    assert (nodes - apart) * per_node % megatron.get("expert_model_parallel_size", 1) == 0


def test_a_step_is_one_global_batch_where_the_ratio_is_forced(config: MasterConfig) -> None:
    """NeMo-RL checks it too, but after the cluster was allocated."""
    if not config.loss_fn.force_on_policy_ratio:
        pytest.skip("it is not")
    step = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    assert config.policy["train_global_batch_size"] == step


def test_asynchronous_grpo_has_engines_of_its_own_and_corrects_for_age(config: MasterConfig) -> None:
    if not config.grpo.async_grpo.enabled:
        pytest.skip("it is synchronous")
    generation = config.policy["generation"]
    assert not generation["colocated"]["enabled"]
    assert generation["vllm_cfg"]["async_engine"]
    assert config.loss_fn.use_importance_sampling_correction


def test_trajectories_fit_into_the_engine_and_into_the_history(config: MasterConfig) -> None:
    generation = config.policy["generation"]
    longest = config.policy["max_total_sequence_length"]
    assert generation["vllm_cfg"]["max_model_len"] == longest
    speculative, step = war_of(generation).speculative, config.grpo.num_prompts_per_step
    if speculative.enabled:
        tokens = step * config.grpo.num_generations_per_prompt * longest
        assert speculative.history.max_tokens >= tokens, "or siblings' tokens go before the step ends"
        assert speculative.history.exchange.max_tokens_per_batch >= longest
