from __future__ import annotations

from typing import Any

from nemo_rl.environments.nemo_gym import NemoGymConfig
from nemo_rl.models.generation.vllm import VllmGeneration

__all__ = ["NemoGymConfig", "VllmGeneration", "validate"]


def validate(
    policy_generation: Any,
    val_dataloader: Any,
    tokenizer: Any,
    val_task_to_env: Any,
    step: int,
    master_config: Any,
    logger: Any = None,
) -> Any:
    raise NotImplementedError
