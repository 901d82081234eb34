from __future__ import annotations

from typing import Any


def resolve_generation_worker_cls(default_cls: str, config: dict[str, Any]) -> str:
    return default_cls if config.get("quant_cfg") is None else f"quantized.{default_cls}"
