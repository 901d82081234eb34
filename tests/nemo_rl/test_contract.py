"""NeMo-RL has what the contract says, and does it; without engines and without Ray."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_war.generation.nemo_rl.contract import check
from nemo_war.generation.nemo_rl.guard import WEIGHT_UPDATES
from tests.double.behaviours import Behaviours, Worker, configuration, generation, worker
from tests.double.workers import Handle

ALGORITHMS = "nemo_rl.algorithms"
CONTROLLER = f"{ALGORITHMS}.single_controller_utils"
EXEMPLAR = Path(os.environ["NEMO_RL_PATH"]) / "examples/configs/grpo_math_1B.yaml"
NO_UPDATES = {
    "prepare_refit_info",
    "prepare_nccl_reshard_refit_info",
    "prepare_sparse_delta_refit_info",
    "update_weights_from_decoded_sparse_payload",  # a part of one, which `finish_sparse_delta_refit` ends
}


def test_the_checkout_has_every_name_of_the_contract() -> None:
    assert check(importlib.import_module) == []


class TestTheCheckout(Behaviours):
    """What can only be seen of NeMo-RL itself, and all that holds for the double too."""

    def test_every_method_of_the_extension_that_updates_weights_is_known_to_the_guard(self) -> None:
        backend = importlib.import_module("nemo_rl.models.generation.vllm.vllm_backend")
        extension = backend.VllmInternalWorkerExtensionWithCheckpointEngine
        names = {name for name in dir(extension) if name.startswith("update_weights") or "refit" in name}
        assert {name for name in names if not name.startswith("_")} == WEIGHT_UPDATES | NO_UPDATES

    @pytest.mark.parametrize("asynchronous", [True, False])
    def test_all_arguments_of_an_engine_are_put_together_before_it_is_made(
        self, asynchronous: bool, model_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("VLLM_USE_V1", "VLLM_ALLOW_INSECURE_SERIALIZATION"):
            monkeypatch.setenv(name, "1")  # it sets them; they are put back
        made, asked = self.unloaded(asynchronous, model_folder), []
        made._create_engine = asked.append
        made._load_model([0], seed=3)
        [arguments] = asked
        assert arguments["seed"] == 3
        extension = arguments["worker_extension_cls"]
        assert extension == "nemo_rl.models.generation.vllm.vllm_backend.VllmInternalWorkerExtension"
        assert arguments["load_format"] == "dummy"
        assert "speculative_config" not in arguments
        assert "additional_config" not in arguments

    def unloaded(self, asynchronous: bool, model_folder: Path) -> Any:
        """A worker as it is before its model is loaded."""
        made = worker(asynchronous)
        made.cfg = configuration(asynchronous, model_name=str(model_folder))
        made.cfg["vllm_cfg"] |= {
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "precision": "float32",
            "skip_tokenizer_init": True,
        }
        made.model_name, made.precision, made.fraction_of_gpus = str(model_folder), "float32", 1.0
        made.tensor_parallel_size = made.pipeline_parallel_size = made.expert_parallel_size = 1
        made.enable_expert_parallel, made.gpu_memory_utilization = False, 0.5
        return made

    def test_step_metrics_are_those_of_drafts_since_the_mark(self) -> None:
        made = generation([Worker({"vllm:spec_decode_num_drafts": 5.0, "vllm:prefix_cache_hits": 7.0})])
        with pytest.warns(RuntimeWarning, match="without snapshot"):
            assert made.get_step_metrics() == {}
        made.snapshot_step_metrics()
        made.worker_group.workers[0].actor.says = {"vllm:spec_decode_num_drafts": 8.0}
        assert made.get_step_metrics()["vllm/spec_num_drafts"] == 3.0

    def test_series_of_a_step_are_four_by_shard(self) -> None:
        series = {"inflight_batch_sizes", "num_pending_samples", "kv_cache_usage_perc", "generation_tokens"}
        made = generation([Worker({name: [1] for name in series}), Worker({})])
        assert made.get_logger_metrics() == {}
        made.cfg["vllm_cfg"]["enable_vllm_metrics_logger"] = True
        assert made.get_logger_metrics() == {name: {0: [1]} for name in series}

    # --- scripts and algorithms ----------------------------------------------------------

    def test_our_block_gets_from_the_command_line_through_nemo_rls_own_validation(self) -> None:
        from nemo_rl.utils import config as theirs
        from omegaconf import OmegaConf

        theirs.register_omegaconf_resolvers()
        theirs.register_omegaconf_resolvers()
        ours = ["++policy.generation.war.speculative.max_draft_tokens=8"]
        with pytest.raises(theirs.OverridesError):
            theirs.parse_hydra_overrides(theirs.load_config(EXEMPLAR), [ours[0].removeprefix("++")])
        config = theirs.parse_hydra_overrides(theirs.load_config(EXEMPLAR), ours)
        master = importlib.import_module(f"{ALGORITHMS}.grpo").MasterConfig(
            **OmegaConf.to_container(config, resolve=True)
        )
        assert master.policy["generation"]["war"] == {"speculative": {"max_draft_tokens": 8}}

    @pytest.mark.parametrize(
        ("module", "function", "names"),
        [
            (f"{ALGORITHMS}.grpo", "setup", {"VllmGeneration", "spinup_nemo_gym_actor"}),
            (f"{ALGORITHMS}.grpo", "grpo_train", {"validate"}),
            (f"{ALGORITHMS}.grpo", "async_grpo_train", {"validate"}),
            (f"{ALGORITHMS}.grpo_sync", "grpo_train_sync", {"validate_sync"}),
            (f"{ALGORITHMS}.ppo", "setup", {"VllmGeneration"}),
            (f"{ALGORITHMS}.ppo", "ppo_train", {"validate"}),
            (f"{ALGORITHMS}.ppo", "async_ppo_train", {"validate"}),
            (f"{ALGORITHMS}.distillation", "setup", {"VllmGeneration", "NemoGymConfig"}),
            (f"{ALGORITHMS}.distillation", "distillation_train", {"validate"}),
            (f"{CONTROLLER}.setup", "_maybe_start_generation_router", {"GenerationRouterActor"}),
            (f"{CONTROLLER}.setup", "setup_single_controller", {"_maybe_start_generation_router"}),
            (
                "nemo_rl.distributed.worker_groups",
                "RayWorkerGroup._create_workers_from_bundle_indices",
                {"create_local_venv_on_each_node"},
            ),
            (
                "nemo_rl.models.generation.vllm.vllm_worker_async",
                "VllmAsyncGenerationWorkerImpl._setup_vllm_server",
                {"_setup_vllm_openai_api_server"},
            ),
            ("nemo_rl.evals.eval", "setup", {"VllmGeneration"}),
        ],
    )
    def test_names_that_we_replace_are_looked_up_in_their_modules(
        self, module: str, function: str, names: set[str]
    ) -> None:
        code = attrgetter(function)(importlib.import_module(module)).__code__
        assert names <= set(_names(code))

    def test_the_single_controller_makes_its_generation_by_the_bare_name(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        setup = importlib.import_module(f"{CONTROLLER}.setup")
        made = SimpleNamespace(finish_generation=lambda: None)
        monkeypatch.setattr(setup, "VllmGeneration", lambda cluster, config, defer_model_load: made)
        monkeypatch.setattr(setup, "configure_vllm_for_router_replay", lambda _: None)
        policy = {"model_name": "m", "generation": {"backend": "vllm"}}
        assert setup._build_generation(None, SimpleNamespace(policy=policy))[0] is made

    def test_the_gym_is_given_its_urls_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        setup, asked = importlib.import_module(f"{CONTROLLER}.setup"), []
        monkeypatch.setattr(setup, "spinup_nemo_gym_actor", lambda **options: asked.append(options))
        monkeypatch.setattr(setup, "router_replay_enabled", lambda _: False)
        policy = {"generation": {"model_name": "m"}, "tokenizer": {}}
        setup._spinup_gym(SimpleNamespace(policy=policy, env={}), ["http://a/v1"], None)
        assert [each["base_urls"] for each in asked] == [["http://a/v1"]]

    def test_the_gym_has_engines_expose_their_servers(self) -> None:
        config = SimpleNamespace(policy={"generation": {"vllm_cfg": {}}})
        importlib.import_module("nemo_rl.environments.nemo_gym").setup_nemo_gym_config(config, None)
        cfg = config.policy["generation"]["vllm_cfg"]
        assert cfg == {"async_engine": True, "expose_http_server": True}

    def test_actors_with_a_copy_of_the_generation_have_the_interpreter_of_vllm(self) -> None:
        from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
        from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES

        for name in (
            f"{ALGORITHMS}.async_utils.AsyncTrajectoryCollector",
            "nemo_rl.experience.sync_rollout_actor.SyncRolloutActor",
        ):
            assert ACTOR_ENVIRONMENT_REGISTRY[name] == PY_EXECUTABLES.VLLM

    # --- rollouts ------------------------------------------------------------------------

    @pytest.mark.parametrize("asynchronous", [True, False])
    def test_a_turn_begins_with_all_tokens_of_the_turn_before_and_says_no_more_of_itself(
        self, asynchronous: bool
    ) -> None:
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict
        from nemo_rl.experience import rollouts

        from tests.nemo_rl.counting import TASK, Counting

        asked, turns = _Asked(asynchronous), [3, 1]
        logs = [
            [{"role": "user", "content": "", "token_ids": torch.tensor([9, number])}] for number in (1, 2)
        ]
        batch = BatchedDataDict(
            {
                "message_log": logs,
                "extra_env_info": [{"turns": left} for left in turns],
                "task_name": [TASK] * 2,
                "length": torch.tensor([2, 2]),
                "loss_multiplier": torch.ones(2),
                "idx": [0, 1],
            }
        )
        run = rollouts.run_async_multi_turn_rollout if asynchronous else rollouts.run_multi_turn_rollout
        environment = Handle(Counting.__ray_metadata__.modified_class())
        run(asked, batch, _Tokenizer(), {TASK: environment}, max_seq_len=100)
        assert asked.keys == {"input_ids", "input_lengths", "stop_strings"}
        for number, count in ((1, turns[0]), (2, turns[1])):
            prompts = [prompt for prompt in asked.prompts if prompt[1] == number]
            assert len(prompts) == count
            for earlier, later in pairwise(prompts):
                answered = [*earlier, *_Asked.ANSWER]
                assert later[: len(answered)] == answered
                assert len(later) > len(answered)
        assert asked.sizes == ([1] * 4 if asynchronous else [2, 1, 1])

    # --- the router of the single controller ---------------------------------------------

    def router(self, **changes: Any) -> Any:
        module = importlib.import_module("nemo_rl.models.generation.generation_router")
        return module.GenerationRouterImpl(
            **{
                "backend_urls": ["http://a:1/v1", "http://b:1/v1"],
                "host": "127.0.0.1",
                "port": 6001,
                "backend_timeout_s": 1.0,
                "connect_timeout_s": 1.0,
                "no_healthy_backend_status": 409,
                **changes,
            }
        )

    def test_the_router_serves_what_the_gym_asks_for_and_nothing_else(self) -> None:
        made = self.router()
        assert made.base_url() == "http://127.0.0.1:6001/v1"
        paths = {resource.canonical for resource in made.build_app().router.resources()}
        assert paths == {"/v1/chat/completions", "/v1/responses", "/v1/models", "/tokenize"}

    def test_the_router_answers_500_while_another_backend_serves_and_reports_each_failure_once(self) -> None:
        made = self.router(health_managed=True)
        first, second = "http://a:1/v1", "http://b:1/v1"
        assert made._on_backend_error(first, TimeoutError()).status == 500
        assert made._on_backend_error(second, TimeoutError()).status == 409
        assert made.drain_backend_failures() == {first: 1, second: 1}
        assert made.drain_backend_failures() == {}
        made.set_serving_backends([second, "http://unknown/v1"])
        assert made.metrics()["router/serving_backends"] == 1
        assert made._on_backend_error(first, TimeoutError()).status == 500

    def test_the_router_without_health_goes_on_with_a_backend_that_failed(self) -> None:
        made = self.router(backend_urls=["http://a:1/v1"])
        assert made._on_backend_error("http://a:1/v1", TimeoutError()).status == 500

    def test_no_status_that_the_gym_tries_again_may_be_configured(self) -> None:
        config = importlib.import_module(f"{CONTROLLER}.config")
        assert config.GenerationRouterConfig().no_healthy_backend_status == 409
        assert {429, 500, 502, 503, 504, 520} == config._GYM_RETRY_STATUSES
        with pytest.raises(ValueError, match="retries"):
            config.GenerationRouterConfig(no_healthy_backend_status=503)


def _names(code: CodeType) -> Iterator[str]:
    """Names that a function, and those within it, look up outside of themselves."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


class _Tokenizer:
    pad_token_id = 0

    def __call__(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=torch.tensor([[7, 7]]))

    def batch_decode(self, rows: Any, **_: Any) -> list[str]:
        return ["text" for _ in rows]


class _Asked:
    """A generation that answers the same whatever it is asked."""

    ANSWER = (3, 4)

    def __init__(self, asynchronous: bool) -> None:
        self.cfg = {
            "backend": "vllm",
            "max_new_tokens": 8,
            "vllm_cfg": {"async_engine": asynchronous, "max_model_len": 100},
        }
        self.prompts: list[list[int]] = []
        self.sizes: list[int] = []
        self.keys: set[str] = set()

    def generate(self, data: Any, greedy: bool = False) -> Any:
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        self.keys |= data.keys()
        self.sizes.append(data.size)
        answers = []
        for row, length in zip(data["input_ids"].tolist(), data["input_lengths"].tolist(), strict=True):
            whole = [*row[:length], *self.ANSWER]
            self.prompts.append(row[:length])
            answers.append(
                BatchedDataDict(
                    {
                        "output_ids": torch.tensor([whole]),
                        "logprobs": torch.zeros((1, len(whole))),
                        "generation_lengths": torch.tensor([len(self.ANSWER)]),
                        "unpadded_sequence_lengths": torch.tensor([len(whole)]),
                        "truncated": torch.tensor([False]),
                    }
                )
            )
        return BatchedDataDict.from_batches(answers, {"output_ids": 0})

    async def generate_async(self, data: Any, greedy: bool = False) -> Any:
        yield 0, self.generate(data, greedy)
