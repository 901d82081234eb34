from __future__ import annotations

from typing import Any


def configure_generation_config(config: Any, tokenizer: Any, is_eval: bool = False) -> Any:
    drafter = config.get("vllm_kwargs", {}).get("speculative_config")
    config["vllm_cfg"]["load_format"] = "auto" if is_eval or drafter else "dummy"
    config["_pad_token_id"] = tokenizer.pad_token_id
    return config
