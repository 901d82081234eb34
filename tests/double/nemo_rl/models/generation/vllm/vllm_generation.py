from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import ray
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.experience.failures import GenerationUnavailable
from nemo_rl.models.generation.vllm.utils import resolve_generation_worker_cls

_VLLM = "nemo_rl.models.generation.vllm"
_SERIES = ("inflight_batch_sizes", "num_pending_samples", "kv_cache_usage_perc", "generation_tokens")
_LEADERS = ["tensor_parallel", "pipeline_parallel"]


class VllmGeneration:
    @staticmethod
    def init_cluster_placement_groups(cluster: Any, config: Any) -> None:
        pass

    def __init__(
        self,
        cluster: Any,
        config: Any,
        name_prefix: str = "vllm_policy",
        workers_per_node: Any = None,
        defer_model_load: bool = False,
    ) -> None:
        self.cfg = config
        cfg = config["vllm_cfg"]
        tied = cfg["tensor_parallel_size"] * cfg["pipeline_parallel_size"]
        self.dp_size = cluster.world_size() // tied
        default = (
            f"{_VLLM}.vllm_worker_async.VllmAsyncGenerationWorker"
            if cfg["async_engine"]
            else f"{_VLLM}.vllm_worker.VllmGenerationWorker"
        )
        worker = resolve_generation_worker_cls(default, config)
        bundles = [(0, list(range(shard * tied, (shard + 1) * tied))) for shard in range(self.dp_size)]
        builder = RayWorkerBuilder(worker, config, defer_model_load=defer_model_load)
        self.worker_group = RayWorkerGroup(cluster, builder, bundle_indices_list=bundles)
        self.current_generate_dp_shard_idx = 0
        self.fleet_monitor: Any = None
        self.fleet_selector: Any = None
        if defer_model_load:
            self.dp_openai_server_base_urls = self._urls("get_reserved_url")
        else:
            self._post_init()
            self.dp_openai_server_base_urls = self._urls("report_dp_openai_server_base_url")
        self._step_metrics_snapshot: dict[str, float] | None = None

    def load_and_start(self) -> None:
        ray.get(self._leaders("load_model"))
        self._post_init()
        self.dp_openai_server_base_urls = self._urls("report_dp_openai_server_base_url")

    def attach_fleet_health(self, monitor: Any, selector: Any) -> None:
        self.fleet_monitor, self.fleet_selector = monitor, selector

    def _post_init(self) -> Any:
        return ray.get(self._leaders(self._named("post_init")))

    # --- requests ------------------------------------------------------------------------

    def generate(self, data: Any, greedy: bool = False) -> Any:
        return self._by_shards("generate", data, greedy)

    def generate_text(self, data: Any, greedy: bool = False) -> Any:
        return self._by_shards("generate_text", data, greedy)

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
        async for result in self._async_generate_base(
            data, "generate_async", lambda data: len(data["input_ids"]) > 0, greedy
        ):
            yield result

    async def generate_text_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
        async for result in self._async_generate_base(
            data, "generate_text_async", lambda data: len(data["prompts"]) > 0, greedy
        ):
            yield result

    async def _async_generate_base(
        self, data: Any, method_name: str, data_validation_fn: Any, greedy: bool = False
    ) -> AsyncIterator[tuple[int, Any]]:
        if not data_validation_fn(data):
            return
        assert data.size == 1
        shard = self._next_dp_shard_idx()
        if self.fleet_selector is not None:
            self.fleet_selector.acquire(shard)
        try:
            async for result in self._generate_on_shard(
                data=data,
                method_name=method_name,
                greedy=greedy,
                dp_shard_idx=shard,
                leader_worker_idx=self.worker_group.get_dp_leader_worker_idx(shard),
            ):
                yield result
        finally:
            if self.fleet_selector is not None:
                self.fleet_selector.release(shard)

    def _next_dp_shard_idx(self) -> int:
        if self.fleet_selector is not None:
            return self.fleet_selector.next_shard()
        shard = self.current_generate_dp_shard_idx
        self.current_generate_dp_shard_idx = (shard + 1) % self.worker_group.dp_size
        return shard

    async def _generate_on_shard(
        self, *, data: Any, method_name: str, greedy: bool, dp_shard_idx: int, leader_worker_idx: int
    ) -> AsyncIterator[tuple[int, Any]]:
        call = self.worker_group.run_single_worker_single_data(
            method_name=method_name, worker_idx=leader_worker_idx, data=data, greedy=greedy
        )
        try:
            index, answer = await (await anext(call))
            answer["gen_leader_worker_idx"] = [leader_worker_idx]
            if self.fleet_monitor is not None:
                self.fleet_monitor.report_success(dp_shard_idx)
            yield index, answer
        except ray.exceptions.RayError as error:
            if self.fleet_monitor is not None:
                self.fleet_monitor.report_failure(dp_shard_idx, error)
            raise GenerationUnavailable(f"shard {dp_shard_idx} is unavailable: {error}") from error
        except (asyncio.CancelledError, GeneratorExit):
            ray.cancel(call)
            raise

    def _by_shards(self, method: str, data: Any, greedy: bool) -> Any:
        sharded = data.shard_by_batch_size(self.dp_size, allow_uneven_shards=True)
        futures = self.worker_group.run_all_workers_sharded_data(
            method, data=sharded, common_kwargs={"greedy": greedy}
        )
        answers = self.worker_group.get_all_worker_results(futures)
        return BatchedDataDict.from_batches(answers, {"output_ids": self.cfg["_pad_token_id"]})

    # --- between requests ----------------------------------------------------------------

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        if self.cfg["colocated"]["enabled"]:
            ray.get(self._leaders(self._named("wake_up"), **kwargs))
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        method = "sleep" if self.cfg["colocated"]["enabled"] else "reset_prefix_cache"
        return self._all_true(method)

    def invalidate_kv_cache(self) -> bool:
        return self._all_true("reset_prefix_cache")

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        ray.get(self._leaders(self._named("prepare_refit_info"), state_dict_info=state_dict_info))

    def update_weights_via_ipc_zmq(self) -> list[Any]:
        return self._leaders(self._named("update_weights_via_ipc_zmq"))

    def update_weights_from_collective(self) -> list[Any]:
        return self._leaders(self._named("update_weights_from_collective"))

    def nccl_reshard_refit(self) -> list[Any]:
        return self._leaders(self._named("nccl_reshard_refit"))

    def snapshot_step_metrics(self) -> None:
        self._step_metrics_snapshot = {}

    def get_step_metrics(self) -> dict[str, float]:
        if self._step_metrics_snapshot is None:
            return {}
        self._step_metrics_snapshot = None
        return {"vllm/spec_num_drafts": 0.0}

    def get_logger_metrics(self) -> dict[str, Any]:
        return {series: {} for series in _SERIES}

    def shutdown(self) -> bool:
        return self.worker_group.shutdown(cleanup_method="shutdown")

    def __del__(self) -> None:
        self.shutdown()

    def _named(self, method: str) -> str:
        return f"{method}_async" if self.cfg["vllm_cfg"]["async_engine"] else method

    def _leaders(self, method: str, **options: Any) -> list[Any]:
        return self.worker_group.run_all_workers_single_data(method, run_rank_0_only_axes=_LEADERS, **options)

    def _all_true(self, method: str) -> bool:
        answers = ray.get(self._leaders(self._named(method)))
        return all(answer for answer in answers if answer is not None)

    def _urls(self, method: str) -> list[str | None]:
        return ray.get(self._leaders(method)) if self.cfg["vllm_cfg"]["async_engine"] else [None]
