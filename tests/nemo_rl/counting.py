"""An environment of NeMo-RL for tests: some turns of counting, each answered by a user."""

from __future__ import annotations

from typing import Any

import ray
import torch
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn

TASK = "counting"


def _observation(left: int) -> str:
    """Long enough to fill a block of KV."""
    words = " ".join(f"word number {number}," for number in range(12))
    return f"\nThere are {words} and {left} turns to come. Go on counting: "


@ray.remote
class Counting(EnvironmentInterface):
    """Goes on for as many turns as its metadata says."""

    def step(self, message_log_batch: list[Any], metadata: list[dict[str, int]]) -> EnvironmentReturn:
        left = [{"turns": each["turns"] - 1} for each in metadata]
        return EnvironmentReturn(
            observations=[{"role": "user", "content": _observation(each["turns"])} for each in left],
            metadata=left,
            next_stop_strings=[None] * len(left),
            rewards=torch.ones(len(left)),
            terminateds=torch.tensor([each["turns"] <= 0 for each in left]),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        return batch, {}
