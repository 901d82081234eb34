"""A recipe for NeMo-RL as its scripts read it: what the doctor looks at, and no more."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

_RECIPE: dict[str, Any] = {
    "cluster": {"num_nodes": 4, "gpus_per_node": 8},
    "grpo": {"async_grpo": {"enabled": False, "in_flight_weight_updates": False}},
    "data": {"train": {"env_name": "math"}},
    "env": {"math": {}},
    "policy": {
        "model_name": "Qwen/Qwen3-32B",
        "dtensor_cfg": {"enabled": True, "lora_cfg": {"enabled": False}},
        "megatron_cfg": {"enabled": False},
        "generation": {
            "backend": "vllm",
            "refit_transport": None,
            "colocated": {"enabled": True, "resources": {"num_nodes": None, "gpus_per_node": None}},
            "vllm_cfg": {
                "async_engine": True,
                "tensor_parallel_size": 4,
                "pipeline_parallel_size": 1,
                "expert_parallel_size": 1,
                "gpu_memory_utilization": 0.7,
                "max_model_len": 40960,
                "kv_cache_dtype": "auto",
                "precision": "bfloat16",
                "enforce_eager": False,
            },
            "vllm_kwargs": {},
            "war": {"enabled": True},
        },
    },
}


def recipe(**changes: Any) -> dict[str, Any]:
    """One, with values at dotted keys changed or added; a dot is written `__`."""
    config = deepcopy(_RECIPE)
    for key, value in changes.items():
        *path, last = key.split("__")
        block = config
        for part in path:
            block = block.setdefault(part, {})
        block[last] = value
    return config


def generation(**changes: Any) -> dict[str, Any]:
    """One, with values under `policy.generation` changed or added."""
    return recipe(**{f"policy__generation__{key}": value for key, value in changes.items()})
