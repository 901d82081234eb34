from __future__ import annotations

from typing import Any, TypedDict


class NemoGymConfig(TypedDict):
    model_name: str
    base_urls: list[str]


def setup_nemo_gym_config(config: Any, tokenizer: Any) -> None:
    raise NotImplementedError


def spinup_nemo_gym_actor(
    env_configs: dict[str, Any],
    base_urls: list[str],
    model_name: str,
    *,
    tokenizer: Any,
    enable_router_replay: bool,
    routed_experts_dtype: str,
    use_fastokens: bool,
) -> Any:
    raise NotImplementedError
