"""What the contract says NeMo-RL does, as far as it can be seen without engines and without Ray.

Run against NeMo-RL and against its double alike: `nemo_rl` is whichever of them can be imported.
"""

from __future__ import annotations

import asyncio
import importlib
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from nemo_war.generation.nemo_rl.affinity import shares
from nemo_war.generation.nemo_rl.facts.refit import UPDATES
from tests.double import workers
from tests.double.engine import FakeAsyncLLM, FakeLLM, SamplingParams

PAD = 0
KEYS = {"output_ids", "generation_lengths", "unpadded_sequence_lengths", "logprobs", "truncated"}
_VLLM = "nemo_rl.models.generation.vllm"
_NOTE: ContextVar[str] = ContextVar("note", default="")


def configuration(asynchronous: bool = True, **changes: Any) -> dict[str, Any]:
    """`policy.generation`, with what NeMo-RL itself fills in."""
    return {
        "backend": "vllm",
        "model_name": "made-up",
        "max_new_tokens": 16,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "val_temperature": 1.0,
        "val_top_p": 1.0,
        "val_top_k": None,
        "stop_token_ids": None,
        "stop_strings": None,
        "_pad_token_id": PAD,
        "colocated": {"enabled": False, "resources": {"gpus_per_node": None, "num_nodes": None}},
        "vllm_kwargs": {},
        "vllm_cfg": {
            "async_engine": asynchronous,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "expert_parallel_size": 1,
            "max_model_len": 1024,
            "load_format": "dummy",
        },
    } | changes


def batch(*prompts: list[int], **more: Any) -> Any:
    """Prompts as rollouts pass them."""
    made = _batch_class()()
    rows = [torch.tensor(prompt) for prompt in prompts]
    made["input_ids"] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    made["input_lengths"] = torch.tensor([len(prompt) for prompt in prompts])
    made["stop_strings"] = [None] * len(prompts)
    made.update(more)
    return made


class Worker:
    """Answers whatever it is asked, and remembers it."""

    def __init__(self, says: Any = True) -> None:
        self.asked: list[str] = []
        self.batches: list[Any] = []
        self.says = says
        self.held = False

    def __getattr__(self, name: str) -> Any:
        def method(**_: Any) -> Any:
            self.asked.append(name)
            return self.says

        return method

    async def generate_async(self, data: Any, greedy: bool) -> Any:
        self.batches.append(data)
        try:
            while self.held:
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.asked.append("cancelled")
            raise
        yield 0, self._answer(data)

    def generate(self, data: Any, greedy: bool) -> Any:
        self.batches.append(data)
        return self._answer(data)

    def _answer(self, data: Any) -> Any:
        lengths = data["input_lengths"]
        return _batch_class()(
            {
                "output_ids": data["input_ids"],
                "logprobs": torch.zeros(data["input_ids"].shape),
                "generation_lengths": torch.zeros_like(lengths),
                "unpadded_sequence_lengths": lengths,
                "truncated": torch.zeros_like(lengths),
            }
        )


def generation(asked: list[Any], asynchronous: bool = True, tied: int = 1, **changes: Any) -> Any:
    """A generation on these workers, made without its constructor, which starts actors."""
    cls = _get(f"{_VLLM}.vllm_generation", "VllmGeneration")
    made = cls.__new__(cls)
    made.cfg = configuration(asynchronous, **changes)
    made.worker_group = workers.Group(asked, tied)
    made.dp_size = size = made.worker_group.dp_size
    made.sharding_annotations = SimpleNamespace(get_axis_size=lambda _: size)
    made.fleet_monitor = made.fleet_selector = made.weight_synchronizer = None
    made.current_generate_dp_shard_idx = 0
    made._step_metrics_snapshot = None
    return made


def worker(asynchronous: bool) -> Any:
    """A worker with an engine that is not one."""
    module, name = (
        ("vllm_worker_async", "VllmAsyncGenerationWorkerImpl")
        if asynchronous
        else ("vllm_worker", "VllmGenerationWorkerImpl")
    )
    cls = _get(f"{_VLLM}.{module}", name)
    made = cls.__new__(cls)
    made.cfg = configuration(asynchronous)
    made.llm = FakeAsyncLLM() if asynchronous else FakeLLM()
    made.SamplingParams = lambda max_tokens, temperature, **_: SamplingParams(max_tokens, temperature)
    made.routed_experts_dtype = torch.int16
    return made


async def answers(stream: Any) -> list[Any]:
    return [each async for each in stream]


def _batch_class() -> Any:
    return _get("nemo_rl.distributed.batched_data_dict", "BatchedDataDict")


def _get(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


async def _settled(answer: Any) -> Any:
    return await answer if asyncio.iscoroutine(answer) else answer


class Behaviours:
    """To be inherited by a class of tests."""

    @pytest.fixture(autouse=True)
    def _nothing_but_python(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ray, "get", workers.get)
        monkeypatch.setattr(ray, "cancel", workers.cancel)
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda _: None)
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)

    # --- a request -----------------------------------------------------------------------

    async def test_a_request_goes_to_the_leader_of_the_shard_that_was_chosen(self) -> None:
        asked = [Worker() for _ in range(4)]
        made = generation(asked, tied=2)
        made._next_dp_shard_idx = lambda: 1
        [(index, answer)] = await answers(made.generate_async(batch([5, 6], extra=["kept"])))
        assert index == 0
        assert answer.keys() == KEYS | {"gen_leader_worker_idx"}
        assert answer["gen_leader_worker_idx"] == [2]
        assert [len(each.batches) for each in asked] == [0, 0, 1, 0]
        assert asked[2].batches[0]["extra"] == ["kept"]

    async def test_the_shard_is_asked_for_once_and_before_anything_is_waited_for(self) -> None:
        made, asked = generation([Worker()]), []

        def choose() -> int:
            asked.append(_NOTE.get())
            return 0

        made._next_dp_shard_idx = choose
        _NOTE.set("mine")
        request = anext(made._async_generate_base(batch([5]), "generate_async", lambda _: True)).__await__()
        request.send(None)  # as far as it gets without waiting
        assert asked == ["mine"]
        request.close()

    async def test_without_a_choice_shards_take_turns(self) -> None:
        made = generation([Worker(), Worker()])
        assert [made._next_dp_shard_idx() for _ in range(3)] == [0, 1, 0]

    async def test_a_request_that_is_cancelled_is_cancelled_at_its_worker(self) -> None:
        asked = Worker()
        asked.held = True
        request = asyncio.ensure_future(answers(generation([asked]).generate_async(batch([5]))))
        while not asked.batches:
            await asyncio.sleep(0.001)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        async with asyncio.timeout(5):
            while asked.asked != ["cancelled"]:
                await asyncio.sleep(0.001)

    async def test_a_worker_that_died_makes_its_shard_unavailable_and_the_monitor_hears_of_it(self) -> None:
        made = generation([Worker(), Worker()])
        monitor, selector = self.fleet(2)
        made.fleet_monitor, made.fleet_selector = monitor, selector
        made._next_dp_shard_idx = lambda: 1
        made.worker_group.run_single_worker_single_data = _died
        for _ in range(3):
            with pytest.raises(_get("nemo_rl.experience.failures", "GenerationUnavailable")):
                await answers(made.generate_async(batch([5])))
        assert monitor.serving_shards() == [0]
        assert selector.inflight(1) == 0
        monitor.report_refit(1, weight_version=1)
        assert monitor.serving_shards() == [0, 1]

    async def test_the_selector_counts_requests_on_the_shard_whoever_chose_it(self) -> None:
        asked = [Worker(), Worker()]
        asked[1].held = True
        made = generation(asked)
        made.fleet_monitor, made.fleet_selector = self.fleet(2)
        made._next_dp_shard_idx = lambda: 1
        request = asyncio.ensure_future(answers(made.generate_async(batch([5]))))
        while not asked[1].batches:
            await asyncio.sleep(0.001)
        assert [made.fleet_selector.inflight(shard) for shard in (0, 1)] == [0, 1]
        asked[1].held = False
        await request
        assert made.fleet_selector.inflight(1) == 0

    def fleet(self, shards: int) -> tuple[Any, Any]:
        health = importlib.import_module("nemo_rl.models.generation.fleet_health")
        monitor = health.GenerationFleetHealth(
            shard_count=shards, policy=health.FleetHealthPolicy(unhealthy_threshold=3)
        )
        return monitor, health.HealthyShardSelector(monitor=monitor)

    # --- a batch -------------------------------------------------------------------------

    @pytest.mark.parametrize("rows", [1, 2, 4, 7])
    def test_a_batch_is_cut_by_position_and_its_answers_are_in_order(self, rows: int) -> None:
        asked = [Worker() for _ in range(3)]
        prompts = [[number + 1] * (number + 1) for number in range(rows)]
        done = generation(asked, asynchronous=False).generate(batch(*prompts))
        assert [each.batches[0].size for each in asked] == shares(rows, 3)
        lengths = done["unpadded_sequence_lengths"].tolist()
        texts = [row[:length].tolist() for row, length in zip(done["output_ids"], lengths, strict=True)]
        assert texts == prompts

    def test_rows_are_selected_in_the_order_of_their_indices_whatever_they_hold(self) -> None:
        chosen = batch([1], [2], [3], objects=[{"a": 1}, None, "c"]).select_indices([2, 0])
        assert chosen["input_ids"].tolist() == [[3], [1]]
        assert chosen["objects"] == ["c", {"a": 1}]
        assert (chosen.size, chosen.pop("objects")) == (2, ["c", {"a": 1}])

    def test_joined_batches_have_the_keys_of_those_that_are_not_empty(self) -> None:
        cls = _batch_class()
        joined = cls.from_batches([cls({"a": [1, (2,)]}), cls({"a": []}), cls({"a": ["x"]})])
        assert joined["a"] == [1, (2,), "x"]

    # --- how a generation comes to be, and ends ------------------------------------------

    @pytest.mark.parametrize("asynchronous", [True, False])
    def test_the_worker_class_is_looked_up_when_a_generation_is_made(
        self, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = importlib.import_module(f"{_VLLM}.vllm_generation")
        asked = []

        def resolve(default_cls: str, config: Any) -> str:
            asked.append((default_cls, config))
            raise InterruptedError

        monkeypatch.setattr(module, "resolve_generation_worker_cls", resolve)
        monkeypatch.setattr(module.VllmGeneration, "__del__", lambda _: None)
        config = configuration(asynchronous, war={"enabled": True})
        config["vllm_cfg"] |= {"gpu_memory_utilization": 0.5, "kv_cache_dtype": "auto"}
        cluster = SimpleNamespace(
            world_size=lambda: 2, num_gpus_per_node=2, _init_placement_groups=lambda **_: None
        )
        with pytest.raises(InterruptedError):
            module.VllmGeneration(cluster, config)
        name = (
            "vllm_worker_async.VllmAsyncGenerationWorker"
            if asynchronous
            else "vllm_worker.VllmGenerationWorker"
        )
        assert asked == [(f"{_VLLM}.{name}", config)]

    def test_only_quantized_generations_have_other_workers(self) -> None:
        resolve = _get(f"{_VLLM}.vllm_generation", "resolve_generation_worker_cls")
        default = f"{_VLLM}.vllm_worker.VllmGenerationWorker"
        assert resolve(default, configuration()) == default
        assert resolve(default, configuration(quant_cfg="some")) != default

    def test_a_worker_class_needs_an_interpreter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        registry = importlib.import_module("nemo_rl.distributed.ray_actor_environment_registry")
        with pytest.raises(ValueError, match=r"of\.ours"):
            registry.get_actor_python_env("of.ours")
        monkeypatch.setitem(registry.ACTOR_ENVIRONMENT_REGISTRY, "of.ours", "python")
        assert registry.get_actor_python_env("of.ours") == "python"

    def test_models_that_are_loaded_later_are_followed_by_the_same_hook(self) -> None:
        asked = [Worker(), Worker()]
        made = generation(asked)
        made._post_init = lambda: [each.asked.append("ours") for each in asked]
        made.load_and_start()
        assert all(each.asked[:2] == ["load_model", "ours"] for each in asked)

    def test_a_generation_that_is_deleted_shuts_down(self) -> None:
        made = generation([Worker()])
        group = made.worker_group
        assert made.shutdown()
        group.workers[0].dead = False
        del made
        assert group.workers[0].dead

    # --- around phases of generation -----------------------------------------------------

    @pytest.mark.parametrize(
        ("asynchronous", "shared", "ends", "begins"),
        [
            (True, False, ["reset_prefix_cache_async"], []),
            (False, False, ["reset_prefix_cache"], []),
            (True, True, ["sleep_async"], ["wake_up_async"]),
            (False, True, ["sleep"], ["wake_up"]),
        ],
    )
    def test_a_phase_ends_with_sleep_where_gpus_are_shared_and_with_a_reset_elsewhere(
        self, asynchronous: bool, shared: bool, ends: list[str], begins: list[str]
    ) -> None:
        asked = Worker()
        made = generation([asked], asynchronous, colocated={"enabled": shared})
        assert made.finish_generation()
        assert made.prepare_for_generation(tags=["weights"])
        assert asked.asked == ends + begins

    @pytest.mark.parametrize(("says", "done"), [(True, True), (False, False), (None, True)])
    def test_caches_count_as_reset_unless_a_worker_says_no(self, says: bool | None, done: bool) -> None:
        assert generation([Worker(), Worker(says)]).invalidate_kv_cache() is done

    @pytest.mark.parametrize("asynchronous", [True, False])
    @pytest.mark.parametrize("update", UPDATES)
    def test_an_update_is_begun_by_the_driver_at_leaders_and_not_waited_for(
        self, update: str, asynchronous: bool
    ) -> None:
        asked = [Worker() for _ in range(4)]
        futures = getattr(generation(asked, asynchronous, tied=2), update)()
        assert workers.get(futures) == [True, True]
        assert asked[0].asked == [f"{update}_async" if asynchronous else update]
        assert asked[1].asked == []

    # --- workers -------------------------------------------------------------------------

    @pytest.mark.parametrize("asynchronous", [True, False])
    @pytest.mark.parametrize("update", UPDATES)
    async def test_an_update_is_a_call_of_the_extensions_method_and_fails_where_that_does(
        self, update: str, asynchronous: bool
    ) -> None:
        made = worker(asynchronous)
        method = getattr(made, f"{update}_async" if asynchronous else update)
        assert await _settled(method()) is True
        assert made.llm.said == [f"worker: {update}"]
        made.llm.fails = RuntimeError("caches are not empty")
        assert await _settled(method()) is False

    @pytest.mark.parametrize("asynchronous", [True, False])
    async def test_checkpoint_engines_call_workers_by_the_methods_name(self, asynchronous: bool) -> None:
        made, update = worker(asynchronous), "update_weights_from_checkpoint_engine"
        method = made.checkpoint_engine_rpc_async if asynchronous else made.checkpoint_engine_rpc
        assert await _settled(method(update)) is True
        await _settled(method("prepare_checkpoint_engine"))
        assert made.llm.said == [f"worker: {update}", "worker: prepare_checkpoint_engine"]
        made.llm.fails = RuntimeError("caches are not empty")
        with pytest.raises(RuntimeError, match="not empty"):
            await _settled(method(update))

    @pytest.mark.parametrize("asynchronous", [True, False])
    async def test_sparse_updates_get_to_the_engine_from_another_thread(self, asynchronous: bool) -> None:
        cls = _get(f"{_VLLM}.vllm_sparse_refit", "VllmSparseRefitReceiver")
        receiver, made = cls.__new__(cls), worker(asynchronous)
        receiver._worker, receiver._refit_async_loop = made, asyncio.get_running_loop()
        for method in ("update_weights_from_decoded_sparse_payload", "finish_sparse_delta_refit"):
            await asyncio.to_thread(receiver._refit_collective_rpc, method, ())
        assert made.llm.said == [
            "worker: update_weights_from_decoded_sparse_payload",
            "worker: finish_sparse_delta_refit",
        ]

    async def test_what_stands_in_for_a_method_of_the_engine_is_called_in_the_callers_context(self) -> None:
        made, seen = worker(asynchronous=True), []
        generate = made.llm.generate

        async def ours(prompt: Any, sampling_params: Any, request_id: str, **_: Any) -> Any:
            seen.append((_NOTE.get(), prompt))
            async for output in generate(prompt, sampling_params, request_id):
                yield output

        made.llm.generate = ours
        _NOTE.set("whose turn")
        [(_, answer)] = await answers(made.generate_async(batch([5, 6], more=["ignored"])))
        assert answer.keys() == KEYS
        assert seen == [("whose turn", {"prompt_token_ids": [5, 6]})]
        made.cfg["stop_token_ids"] = []
        await answers(made.generate_text_async(_batch_class()({"prompts": ["text"]})))
        assert seen[1] == ("whose turn", "text")

    def test_a_synchronous_worker_asks_its_engine_once_for_all_rows_in_order(self) -> None:
        made, seen = worker(asynchronous=False), []
        generate = made.llm.generate

        def ours(prompts: Any, sampling_params: Any, **options: Any) -> Any:
            seen.append((_NOTE.get(), prompts))
            return generate(prompts, sampling_params, **options)

        made.llm.generate = ours
        _NOTE.set("whose turns")
        answer = made.generate(batch([5, 6], [7], more=["ignored"] * 2))
        assert answer.keys() == KEYS
        assert seen == [("whose turns", [{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7]}])]
        assert made.generate_text(_batch_class()({"prompts": ["a", "b"]}))["texts"] == ["text", "text"]
        assert seen[1] == ("whose turns", ["a", "b"])

    @pytest.mark.parametrize("asynchronous", [True, False])
    async def test_what_the_engine_says_of_a_reset_is_dropped(self, asynchronous: bool) -> None:
        made = worker(asynchronous)
        made.llm.refuses = True
        method = made.reset_prefix_cache_async if asynchronous else made.reset_prefix_cache
        assert await _settled(method()) is None
        assert made.llm.said == ["reset_prefix_cache"]

    def test_engines_have_seeds_of_their_own(self) -> None:
        configure = _get(f"{_VLLM}.vllm_worker", "BaseVllmGenerationWorker").configure_worker
        bundles = [(node, [first, first + 1]) for node in range(2) for first in (0, 2)]
        seeds = {configure(1, each)[2]["seed"] for each in bundles}
        assert len(seeds) == len(bundles)
        assert "seed" not in configure(1, None)[2]

    # --- the configuration, and checkpoints ----------------------------------------------

    def test_our_block_is_left_alone_and_dummy_weights_do_for_it(self) -> None:
        block = {"speculative": {"max_draft_tokens": 8}}
        config = self.configured(configuration(war=dict(block)))
        assert config["war"] == block
        assert config["vllm_cfg"]["load_format"] == "dummy"

    @pytest.mark.filterwarnings("ignore:Speculative decoding")
    def test_a_drafter_in_the_configuration_has_the_whole_checkpoint_loaded(self) -> None:
        kwargs = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
        config = self.configured(configuration(vllm_kwargs=kwargs))
        assert config["vllm_cfg"]["load_format"] == "auto"

    def configured(self, config: Any) -> Any:
        del config["_pad_token_id"]
        tokenizer = SimpleNamespace(pad_token_id=PAD, eos_token_id=1)
        return _get("nemo_rl.models.generation", "configure_generation_config")(config, tokenizer)

    def test_only_an_explicit_false_switches_prefix_caching_off(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        resolve = _get(f"{_VLLM}.vllm_worker", "_resolve_enable_prefix_caching")
        assert [resolve({"enable_prefix_caching": value}) for value in (None, True, False)] == [
            True,
            True,
            False,
        ]

    def test_a_checkpoint_is_a_temporary_folder_first(self, tmp_path: Path) -> None:
        config = {
            "checkpoint_dir": str(tmp_path),
            "metric_name": None,
            "higher_is_better": True,
            "keep_top_k": None,
            "save_period": 1,
            "save_optimizer": True,
        }
        manager = _get("nemo_rl.utils.checkpoint", "CheckpointManager")(config)
        assert manager.get_latest_checkpoint_path() is None
        assert manager.get_resume_paths(None) == (None, None)
        for step in (9, 10):
            (tmp_path / f"tmp_step_{step}").mkdir()
            (tmp_path / f"tmp_step_{step}" / "left behind").touch()
            folder = Path(manager.init_tmp_checkpoint(step, {}))
            assert folder == tmp_path / f"tmp_step_{step}"
            assert not (folder / "left behind").exists()
            (folder / "ours").touch()
            manager.finalize_checkpoint(folder)
        latest = manager.get_latest_checkpoint_path()
        assert latest == str(tmp_path / "step_10")
        assert (Path(latest) / "ours").exists()
        (Path(latest) / "policy" / "optimizer").mkdir(parents=True)
        weights, optimizer = manager.get_resume_paths(latest)
        assert (weights, optimizer) == (
            Path(latest) / "policy" / "weights",
            Path(latest) / "policy" / "optimizer",
        )


def _died(**_: Any) -> Any:
    async def stream() -> Any:
        raise ray.exceptions.RayActorError
        yield

    return stream()
