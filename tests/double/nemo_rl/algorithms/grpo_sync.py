from __future__ import annotations

from typing import Any


def validate_sync(
    *,
    rollout_actor: Any,
    policy: Any,
    val_dataloader: Any,
    val_task_to_env: Any,
    step: int,
    master_config: Any,
    logger: Any = None,
    partition_id: str = "val",
) -> Any:
    raise NotImplementedError
