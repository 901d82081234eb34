"""The worker, with the configured extension mixed in."""

from __future__ import annotations

import importlib

from tools.chaos_bench.faults import Faults
from vllm.config import VllmConfig
from vllm.v1.core.sched.scheduler import Sampled, SchedulerOutput
from vllm.v1.worker.model_runner import ModelRunner


class Worker:
    """What `collective_rpc` calls methods of.

    Attributes:
        vllm_config: of the engine.
        model_runner: computes.
        rank: the only one.
    """

    rank = local_rank = 0

    def __init__(self, vllm_config: VllmConfig, faults: Faults) -> None:
        self.vllm_config = vllm_config
        self.model_runner = ModelRunner(vllm_config, faults)

    def execute_model(self, step: SchedulerOutput) -> dict[str, Sampled]:
        return self.model_runner.execute_model(step)


def extended(extension: str) -> type[Worker]:
    """A worker class with an extension.

    Args:
        extension: class by dotted path; empty for none.

    Raises:
        ValueError: it has an attribute that the worker has already, as vLLM refuses it, too.
    """
    if not extension:
        return Worker
    module, _, name = extension.rpartition(".")
    mixed_in = getattr(importlib.import_module(module), name)
    clashes = [each for each in dir(mixed_in) if not each.startswith("__") and hasattr(Worker, each)]
    if clashes:
        raise ValueError(f"the worker already has {', '.join(clashes)}, which {extension} defines")
    return type(Worker.__name__, (Worker, mixed_in), {})
