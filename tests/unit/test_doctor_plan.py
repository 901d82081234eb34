"""What the doctor says of a recipe, from its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_war.config import WarConfig
from nemo_war.doctor import graphs, model
from nemo_war.doctor.cluster import cluster
from nemo_war.doctor.finding import Finding, State
from nemo_war.doctor.host import BYTES_PER_TOKEN
from nemo_war.doctor.plan import plan
from nemo_war.errors import ConfigError
from nemo_war.generation.nemo_rl.block import war_of
from nemo_war.speculative.history import SuffixHistory
from tests.unit.recipes_as_dicts import generation, recipe


def findings(config: dict[str, Any]) -> dict[str, Finding]:
    """By what they are about."""
    return {each.about: each for each in plan(config, war_of(config["policy"]["generation"]))}


# --- engines -------------------------------------------------------------------------------


def test_engines_share_all_nodes_with_training() -> None:
    found = cluster(recipe())
    assert (found.nodes, found.gpus, found.replicas, found.replicas_per_node) == (4, 32, 8, 2)


def test_engines_have_nodes_of_their_own() -> None:
    apart = {"enabled": False, "resources": {"num_nodes": 1, "gpus_per_node": 8}}
    found = cluster(generation(colocated=apart))
    assert (found.nodes, found.gpus, found.replicas, found.colocated) == (1, 8, 2, False)


def test_engines_have_some_gpus_of_a_single_node() -> None:
    apart = {"enabled": False, "resources": {"num_nodes": None, "gpus_per_node": 4}}
    config = generation(colocated=apart)
    config["cluster"]["num_nodes"] = 1
    assert cluster(config).replicas == 1


def test_an_engine_may_span_nodes() -> None:
    found = cluster(generation(vllm_cfg__tensor_parallel_size=16))
    assert (found.replicas, found.replicas_per_node) == (2, 1)


def test_a_reward_model_has_nodes_or_gpus_of_its_own() -> None:
    resources = {"resources": {"num_nodes": 1, "gpus_per_node": 4}}
    judged = recipe(data__train=[{"env_name": "reward_model"}], env__reward_model=resources)
    assert cluster(judged).nodes == 3
    judged["cluster"]["num_nodes"] = 1
    assert cluster(judged).gpus == 4
    assert cluster(recipe(env__reward_model=resources)).nodes == 4, "it is not used"


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (generation(vllm_cfg__tensor_parallel_size=3), "policy.generation.vllm_cfg.tensor_parallel_size=3"),
        (
            generation(colocated={"enabled": False, "resources": {"num_nodes": None, "gpus_per_node": 8}}),
            "policy.generation.colocated.resources.num_nodes=None",
        ),
        (
            generation(colocated={"enabled": False, "resources": {"num_nodes": 1, "gpus_per_node": 4}}),
            "policy.generation.colocated.resources.gpus_per_node=4",
        ),
        (
            recipe(
                cluster__num_nodes=1,
                policy__generation__colocated={
                    "enabled": False,
                    "resources": {"num_nodes": 1, "gpus_per_node": 8},
                },
            ),
            "policy.generation.colocated.resources.gpus_per_node=8",
        ),
    ],
    ids=["odd", "no nodes", "half a node", "none left to train"],
)
def test_what_nemo_rl_refuses_once_nodes_are_there_is_said_before(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError):
        cluster(config)
    (refused,) = findings(config).values()
    assert refused.state is State.FAIL
    assert refused.says.startswith(key)


# --- CUDA graphs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "most", "left"),
    [
        ([1, 2, 4, 8, 16, 32, 64], None, [13, 26, 39]),
        ([13, 26, 52], None, [13, 26, 52]),
        ([13, 26, 52], 30, [13, 26]),
        ([20], None, [13]),
        ([1, 2, 4, 8], None, []),
        ([512, 1], None, [13]),
    ],
    ids=["as NeMo-RL's", "in multiples", "bounded by a step", "one rounded down", "none", "the largest goes"],
)
def test_graphs_are_rounded_up_and_those_beyond_the_largest_dropped(
    sizes: list[int], most: int | None, left: list[int]
) -> None:
    assert graphs.left(sizes, 13, most) == left


@pytest.mark.parametrize(
    ("changes", "state", "requests"),
    [
        ({}, State.OK, 39),
        ({"compilation_config": {"cudagraph_capture_sizes": [13 * n for n in range(1, 33)]}}, State.OK, 32),
        ({"compilation_config": {"cudagraph_capture_sizes": [*range(8, 513, 8)]}}, State.NOTE, 39),
        ({"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}}, State.NOTE, 3),
        ({"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}}, State.FAIL, 0),
        ({"compilation_config": {"max_cudagraph_capture_size": 128}}, State.OK, 9),
        ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, State.OK, None),
        ({"enforce_eager": True}, State.NOTE, 0),
    ],
    ids=["default", "aligned", "rounded", "few", "none", "smaller", "piecewise", "eager"],
)
def test_few_graphs_are_a_note_and_none_is_a_failure(
    changes: dict[str, Any], state: State, requests: int | None
) -> None:
    (found,) = graphs.judge({"vllm_kwargs": changes}, 12)
    assert (found.state, found.facts.get("cuda_graph_requests")) == (state, requests)
    assert found.fix is not None or state is not State.FAIL


# --- the plan ------------------------------------------------------------------------------


def test_the_plan_of_a_plain_recipe_has_nothing_but_what_is_well() -> None:
    found = findings(recipe())
    assert {each.state for each in found.values()} == {State.OK}
    facts = {key: value for each in found.values() for key, value in each.facts.items()}
    assert facts == {
        "replicas": 8,
        "tensor_parallel": 4,
        "pipeline_parallel": 1,
        "expert_parallel": 1,
        "nodes": 4,
        "gpus": 32,
        "colocated": True,
        "gpu_memory_utilization": 0.7,
        "max_model_len": 40960,
        "kv_cache_dtype": "auto",
        "placement": "scheduler",
        "max_draft_tokens": 12,
        "proposer": "nemo_war.speculative.proposer.SuffixProposer",
        "cuda_graph_requests": 39,
        "history_exchange": "step",
        "refit_transport": "ipc",
        "in_flight_updates": False,
        "history_bytes_per_replica": 104_000_000,
        "history_bytes_per_node": 208_000_000,
        "threads_per_process": 1,
        "ab_every": None,
    }


def test_without_war_there_is_no_plan() -> None:
    assert [*findings(generation(war=None))] == ["WAR"]
    assert [*findings(generation(war={"enabled": False}))] == ["WAR"]


def test_without_drafts_there_is_no_history() -> None:
    found = findings(generation(war={"speculative": {"enabled": False}}))
    assert found["drafts"].facts["max_draft_tokens"] == 0
    assert found["host memory"].facts["history_bytes_per_node"] == 0
    assert "CUDA graphs" not in found


def test_the_bytes_of_a_token_are_those_of_a_history() -> None:
    def size(tokens: int) -> int:
        return SuffixHistory(max_tokens=tokens, max_draft=12).stats().bytes

    assert (size(2 << 20) - size(1 << 20)) / (1 << 20) == pytest.approx(BYTES_PER_TOKEN, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "placement"),
    [
        ({}, "scheduler"),
        ({"policy__generation__vllm_cfg__async_engine": False}, "affinity"),
        (
            {"env__should_use_nemo_gym": True, "policy__generation__vllm_cfg__expose_http_server": True},
            "router",
        ),
    ],
)
def test_who_places_turns_depends_on_how_they_come(changes: dict[str, Any], placement: str) -> None:
    assert findings(recipe(**changes))["placement"].facts["placement"] == placement


def test_a_gym_without_servers_to_ask_is_a_failure() -> None:
    config = recipe(env__should_use_nemo_gym=True)
    states = [each.state for each in plan(config, WarConfig()) if each.about == "placement"]
    assert State.FAIL in states


def test_with_a_gym_histories_are_exchanged_at_the_end_of_a_step_or_not_at_all() -> None:
    config = recipe(
        env__should_use_nemo_gym=True,
        policy__generation__vllm_cfg__expose_http_server=True,
        policy__generation__war={"speculative": {"history": {"exchange": {"when": "live"}}}},
    )
    exchange = findings(config)["exchange"]
    assert (exchange.state, exchange.facts["history_exchange"]) == (State.NOTE, "step")
    exchange = findings(config | {"async_rl": {}})["exchange"]
    assert (exchange.state, exchange.facts["history_exchange"]) == (State.NOTE, "off")


@pytest.mark.parametrize(
    ("transport", "colocated", "state", "name"),
    [
        (None, True, State.OK, "ipc"),
        (None, False, State.OK, "nccl"),
        ("nccl_reshard", False, State.OK, "nccl_reshard"),
        ("vllm_zmq_sparse", False, State.OK, "vllm_zmq_sparse"),
        ("nixl", False, State.OK, "nixl"),
        ("mine:Engine", False, State.OK, "mine:Engine"),
        ("nixl", True, State.FAIL, None),
        ("nccl_reshard", True, State.FAIL, None),
    ],
)
def test_the_way_of_weights_is_found_by_nemo_rls_rules(
    transport: str | None, colocated: bool, state: State, name: str | None
) -> None:
    resources = {"num_nodes": 1, "gpus_per_node": 8}
    config = generation(refit_transport=transport, colocated={"enabled": colocated, "resources": resources})
    refit = findings(config)["refit"]
    assert (refit.state, refit.facts.get("refit_transport")) == (state, name)


@pytest.mark.parametrize(
    ("changes", "in_flight"),
    [
        ({}, False),
        ({"grpo__async_grpo": {"enabled": True, "in_flight_weight_updates": True}}, True),
        ({"grpo__async_grpo": {"enabled": True, "in_flight_weight_updates": False}}, False),
        ({"async_rl": {}}, True),
    ],
    ids=["synchronous", "in flight", "drained", "single controller"],
)
def test_whether_turns_run_while_weights_change(changes: dict[str, Any], in_flight: bool) -> None:
    assert findings(recipe(**changes))["updates"].facts["in_flight_updates"] is in_flight


@pytest.mark.parametrize(
    ("config", "about", "state"),
    [
        (recipe(policy__model_name="nvidia/NVIDIA-Nemotron-Nano-9B-v2"), "hybrid", State.NOTE),
        (recipe(policy__router_replay={"enabled": True}), "router replay", State.NOTE),
        (recipe(policy__dtensor_cfg__lora_cfg={"enabled": True}), "LoRA", State.NOTE),
        (recipe(policy__megatron_cfg__peft={"enabled": True}), "LoRA", State.NOTE),
        (generation(vllm_kwargs__enable_lora=True), "LoRA", State.NOTE),
        (generation(vllm_cfg__kv_cache_dtype="fp8_e4m3"), "FP8", State.NOTE),
        (generation(vllm_cfg__precision="fp8"), "FP8", State.NOTE),
        (generation(vllm_cfg__expert_parallel_size=4), "EP", State.NOTE),
        (generation(vllm_cfg__expert_parallel_size=8, vllm_cfg__async_engine=False), "EP", State.NOTE),
        (
            generation(vllm_cfg__pipeline_parallel_size=2, war={"speculative": {"enabled": False}}),
            "PP",
            State.NOTE,
        ),
        (generation(vllm_cfg__env_vars={"VLLM_USE_V2_MODEL_RUNNER": "1"}), "model runner", State.FAIL),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_nobody_has_seen_together_is_a_note_and_what_cannot_be_a_failure(
    config: dict[str, Any], about: str, state: State
) -> None:
    found = findings(config)[about]
    assert found.state is state
    assert found.fix or state is State.NOTE


# --- the model -----------------------------------------------------------------------------


def test_a_models_configuration_is_found_in_its_folder_or_in_the_hubs_cache(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    snapshot = tmp_path / "hub/models--org--name/snapshots/0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "nemotron_h"}')
    environment = {"HF_HOME": str(tmp_path)}
    assert model.configuration(str(tmp_path), environment) == {"model_type": "qwen3"}
    assert model.configuration("org/name", environment) == {"model_type": "nemotron_h"}
    assert model.configuration("org/other", environment) is None
    (snapshot / "config.json").write_text("[")
    assert model.configuration("org/name", environment) is None


@pytest.mark.parametrize(
    ("found", "keeps"),
    [
        ({"model_type": "qwen3"}, False),
        ({"hybrid_override_pattern": "M-M*"}, True),
        ({"mamba_num_heads": 128}, True),
        ({"layer_types": ["linear_attention", "full_attention"]}, True),
        ({"layer_types": ["sliding_attention", "full_attention"]}, False),
        ({"text_config": {"layers_block_type": ["mamba", "attention"]}}, True),
    ],
    ids=json.dumps,
)
def test_layers_with_a_state_are_seen_in_a_models_configuration(found: dict[str, Any], keeps: bool) -> None:
    assert model.keeps_states("any/name", found) is keeps


@pytest.mark.parametrize(
    ("name", "keeps"),
    [
        ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", True),
        ("nvidia/Nemotron-H-8B-Base-8K", True),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", True),
        ("Qwen/Qwen3-30B-A3B", False),
        ("nvidia/Llama-3.1-Nemotron-Nano-8B-v1", False),
        ("meta-llama/Llama-3.2-1B", False),
    ],
)
def test_or_in_its_name(name: str, keeps: bool) -> None:
    assert model.keeps_states(name, None) is keeps
