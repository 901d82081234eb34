from typing import Any

import ray
from nemo_rl.environments.nemo_gym import spinup_nemo_gym_actor
from nemo_rl.models.generation.generation_router import GenerationRouterImpl
from nemo_rl.models.generation.vllm import VllmGeneration

__all__ = ["GenerationRouterActor", "VllmGeneration", "spinup_nemo_gym_actor"]

GenerationRouterActor = ray.remote(GenerationRouterImpl)


def _maybe_start_generation_router(generation: Any, master_config: Any) -> Any:
    return GenerationRouterActor if master_config else None
