"""An engine's configuration, in vLLM's parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class ModelConfig:
    """The model.

    Attributes:
        model: folder with `*.safetensors` and `config.json`, or any name.
        seed: of sampling.
        max_model_len: longest sequence.
    """

    model: str
    seed: int
    max_model_len: int
    vocab_size: int = 1024
    eos_token_id: int = 2

    def __post_init__(self) -> None:
        described = Path(self.model) / "config.json"
        if described.is_file():
            facts = json.loads(described.read_text())
            self.vocab_size = facts.get("vocab_size", self.vocab_size)
            self.eos_token_id = facts.get("eos_token_id", self.eos_token_id)

    def get_vocab_size(self) -> int:
        return self.vocab_size


@dataclass
class CacheConfig:
    """The KV cache, in blocks."""

    block_size: int
    num_gpu_blocks: int
    enable_prefix_caching: bool


@dataclass
class SchedulerConfig:
    """How much is computed in a step, at most."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass
class ParallelConfig:
    """The one process of an engine."""

    worker_extension_cls: str
    rank: int = 0
    tensor_parallel_size: int = 1


@dataclass
class SpeculativeConfig:
    """The drafter: a class, by dotted path."""

    method: str
    model: str
    num_speculative_tokens: int

    def __post_init__(self) -> None:
        if self.method != "custom_class":
            raise ValueError(f"this engine drafts with a custom_class only, not with {self.method}")


@dataclass
class VllmConfig:
    """All of it."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig
    speculative_config: SpeculativeConfig | None = None
    additional_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cache, longest = self.cache_config, self.model_config.max_model_len
        if (cache.num_gpu_blocks - 1) * cache.block_size < longest:
            raise ValueError(
                f"To serve at least one request with the model's max seq len ({longest}), more KV cache "
                f"is needed than {cache.num_gpu_blocks} blocks of {cache.block_size} tokens"
            )


@contextmanager
def set_current_vllm_config(vllm_config: VllmConfig) -> Iterator[None]:
    """Make a configuration the current one while weights are loaded; nothing here asks for it."""
    yield
