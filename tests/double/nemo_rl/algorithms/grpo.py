from __future__ import annotations

from typing import Any

from nemo_rl.environments.nemo_gym import spinup_nemo_gym_actor
from nemo_rl.models.generation.vllm import VllmGeneration
from pydantic import BaseModel

__all__ = ["MasterConfig", "VllmGeneration", "spinup_nemo_gym_actor", "validate"]


class MasterConfig(BaseModel, extra="allow"):
    policy: dict[str, Any]


def validate(
    policy_generation: Any,
    val_dataloader: Any,
    tokenizer: Any,
    val_task_to_env: Any,
    step: int,
    master_config: Any,
    logger: Any = None,
    processor: Any = None,
) -> Any:
    raise NotImplementedError
