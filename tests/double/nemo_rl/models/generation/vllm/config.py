from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from nemo_rl.models.generation.interfaces import GenerationConfig


class VllmSpecificArgs(TypedDict):
    async_engine: bool
    pipeline_parallel_size: int
    expose_http_server: NotRequired[bool]
    load_format: NotRequired[str]


class VllmConfig(GenerationConfig):
    vllm_cfg: VllmSpecificArgs
    vllm_kwargs: NotRequired[dict[str, Any]]
    quant_cfg: NotRequired[str | None]
