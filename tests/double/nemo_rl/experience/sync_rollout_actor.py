from typing import Any

import ray


@ray.remote
class SyncRolloutActor:
    def __init__(self, policy_generation: Any) -> None:
        self.policy_generation = policy_generation
