from __future__ import annotations

from typing import Any


def run_multi_turn_rollout(
    policy_generation: Any, input_batch: Any, tokenizer: Any, task_to_env: Any, max_seq_len: int
) -> None:
    raise NotImplementedError


def run_async_multi_turn_rollout(
    policy_generation: Any, input_batch: Any, tokenizer: Any, task_to_env: Any, max_seq_len: int
) -> None:
    raise NotImplementedError
