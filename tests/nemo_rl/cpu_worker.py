"""NeMo-RL's vLLM workers and ours on a machine without a GPU."""

from __future__ import annotations

from typing import Any

import ray
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

from nemo_war.generation.nemo_rl.worker import WarAsyncWorkerImpl, WarSyncWorkerImpl

_EXTENSIONS = {"VllmInternalWorkerExtension": "Stock", "WarWorkerExtension": "War"}


def _for_cpu(arguments: dict[str, Any]) -> dict[str, Any]:
    name = arguments["worker_extension_cls"].rpartition(".")[2]
    extension = f"tests.nemo_rl.cpu_extension.{_EXTENSIONS[name]}"
    return arguments | {"enable_sleep_mode": False, "worker_extension_cls": extension}


class _AsyncOnCpu(VllmAsyncGenerationWorkerImpl):
    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        super()._create_engine(_for_cpu(llm_kwargs))


class _SyncOnCpu(VllmGenerationWorkerImpl):
    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        super()._create_engine(_for_cpu(llm_kwargs))


@ray.remote
class StockAsync(_AsyncOnCpu):
    pass


@ray.remote
class StockSync(_SyncOnCpu):
    pass


@ray.remote
class WarAsync(WarAsyncWorkerImpl, _AsyncOnCpu):
    pass


@ray.remote
class WarSync(WarSyncWorkerImpl, _SyncOnCpu):
    pass
