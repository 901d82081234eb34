"""The engine arguments that mean something here; any other is refused, as by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)

_BYTES_PER_TOKEN = 23_040
"""KV of SmolLM2-135M in bfloat16: 30 layers with 3 heads of 64 keys and values."""


@dataclass
class AsyncEngineArgs:
    """Arguments of an engine.

    `dtype`, `enforce_eager`, `logprobs_mode` and `disable_log_stats` change nothing: there
    are no numbers, nothing is compiled, logprobs are those of what is sampled and nobody logs.
    """

    model: str
    seed: int = 0
    dtype: str = "auto"
    max_model_len: int = 4096
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int = 2**28
    num_gpu_blocks_override: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enforce_eager: bool = False
    logprobs_mode: str = "raw_logprobs"
    disable_log_stats: bool = False
    worker_extension_cls: str = ""
    speculative_config: dict[str, Any] | None = None
    additional_config: dict[str, Any] = field(default_factory=dict)

    def create_engine_config(self) -> VllmConfig:
        """The same, in parts.

        Raises:
            ValueError: more than one process is asked for, or too little KV cache.
        """
        if (self.tensor_parallel_size, self.pipeline_parallel_size) != (1, 1):
            raise ValueError("this engine is one process: tensor and pipeline parallel sizes must be 1")
        blocks = self.num_gpu_blocks_override
        if blocks is None:
            blocks = self.kv_cache_memory_bytes // (_BYTES_PER_TOKEN * self.block_size)
        return VllmConfig(
            ModelConfig(self.model, self.seed, self.max_model_len),
            CacheConfig(self.block_size, blocks, self.enable_prefix_caching),
            SchedulerConfig(self.max_num_seqs, self.max_num_batched_tokens),
            ParallelConfig(self.worker_extension_cls),
            None if self.speculative_config is None else SpeculativeConfig(**self.speculative_config),
            self.additional_config,
        )
