"""A NeMo-RL cluster of logical GPUs, and generations on it: stock's and ours."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.distributed import ray_actor_environment_registry as registry
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.generation import configure_generation_config
from nemo_rl.models.generation.vllm import vllm_generation
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
from omegaconf import OmegaConf

from nemo_war.generation.nemo_rl import seams
from nemo_war.generation.nemo_rl.generation import WarGeneration

STOCK = WarGeneration.__base__
_WORKERS = {
    "VllmAsyncGenerationWorker": "StockAsync",
    "VllmGenerationWorker": "StockSync",
    "WarAsyncWorker": "WarAsync",
    "WarSyncWorker": "WarSync",
}
_ENGINE = {
    "precision": "float32",
    "enforce_eager": True,
    "load_format": "auto",
    "max_model_len": 1024,
    "enable_prefix_caching": True,
    "gpu_memory_utilization": 0.1,
    "enable_vllm_metrics_logger": False,
}


def generation_config(model: Path, asynchronous: bool, war: dict[str, Any] | None, **changes: Any) -> Any:
    """`policy.generation` of NeMo-RL's exemplar, for the bundled model."""
    register_omegaconf_resolvers()
    exemplar = Path(os.environ["NEMO_RL_PATH"]) / "examples/configs/grpo_math_1B.yaml"
    config = OmegaConf.to_container(load_config(exemplar), resolve=True)["policy"]["generation"]
    config |= {"model_name": str(model), "max_new_tokens": 48} | changes
    config = configure_generation_config(config, tokenizer(model))
    config["colocated"]["enabled"] = False
    config["vllm_cfg"] |= _ENGINE | {"async_engine": asynchronous}
    # As small as vLLM's CPU engine takes: tests have short prompts.
    config["vllm_kwargs"] = {"block_size": 32}
    return config if war is None else config | {"war": war}


def tokenizer(model: Path) -> Any:
    return get_tokenizer({"name": str(model)})


@contextmanager
def on_cpu() -> Iterator[None]:
    """Generations that are made in the block have workers that need no GPU."""
    seams.install()
    resolve = vllm_generation.resolve_generation_worker_cls

    def resolve_for_cpu(default: str, config: Any) -> str:
        name = f"tests.nemo_rl.cpu_worker.{_WORKERS[resolve(default, config).rpartition('.')[2]]}"
        registry.ACTOR_ENVIRONMENT_REGISTRY[name] = registry.VLLM_EXECUTABLE
        return name

    vllm_generation.resolve_generation_worker_cls = resolve_for_cpu
    try:
        yield
    finally:
        vllm_generation.resolve_generation_worker_cls = resolve


@contextmanager
def generation(config: Any, replicas: int = 2) -> Iterator[Any]:
    """NeMo-RL's generation, or ours where the configuration has the block, on CPU workers."""
    cluster = RayVirtualCluster([replicas], num_gpus_per_node=replicas, name=uuid4().hex)
    with on_cpu():
        made = WarGeneration(cluster, config, name_prefix=cluster.name)
    try:
        yield made
    finally:
        made.shutdown()
        cluster.shutdown()


def batch(prompts: Sequence[Sequence[int]], pad: int) -> BatchedDataDict:
    """Prompts as rollouts pass them."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.full((len(prompts), int(lengths.max())), pad)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    return BatchedDataDict(
        {"input_ids": ids, "input_lengths": lengths, "stop_strings": [None] * len(prompts)}
    )


def answered(made: Any, prompts: Sequence[Sequence[int]], greedy: bool = False) -> list[Any]:
    """Answers one by one, whichever way the engine takes requests; each as a batch of one."""
    pad = made.cfg["_pad_token_id"]
    if not made.cfg["vllm_cfg"]["async_engine"]:
        done = made.generate(batch(prompts, pad), greedy)
        return [done.select_indices([index]) for index in range(len(prompts))]

    async def one(prompt: Sequence[int]) -> Any:
        [(_, answer)] = [each async for each in made.generate_async(batch([prompt], pad), greedy)]
        return answer

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*map(one, prompts))

    return asyncio.run(all_of_them())


def text(answer: Any) -> list[int]:
    """Prompt and answer, without padding."""
    return answer["output_ids"][0, : int(answer["unpadded_sequence_lengths"][0])].tolist()


def new(answer: Any) -> tuple[list[int], list[float]]:
    """The generated tokens and their logprobs."""
    whole, length = text(answer), int(answer["generation_lengths"][0])
    start = len(whole) - length
    return whole[start:], answer["logprobs"][0, start : start + length].tolist()
