from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


class CheckpointManager:
    def __init__(self, config: Any) -> None:
        self.checkpoint_dir = Path(config["checkpoint_dir"])

    @staticmethod
    def get_resume_paths(
        last_checkpoint_path: Any, *, model_component: str = "policy"
    ) -> tuple[Path | None, Path | None]:
        if not last_checkpoint_path:
            return None, None
        folder = Path(last_checkpoint_path) / model_component
        return folder / "weights", folder / "optimizer"

    def init_tmp_checkpoint(self, step: int, training_info: Any, run_config: Any = None) -> Path:
        folder = self.checkpoint_dir / f"tmp_step_{step}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def finalize_checkpoint(self, checkpoint_path: Any) -> None:
        path = Path(checkpoint_path)
        path.rename(path.with_name(path.name.removeprefix("tmp_")))

    def begin_finalization(self, checkpoint_path: Any, wait_fn: Callable[[], None] | None = None) -> None:
        if wait_fn is not None:
            wait_fn()
        self.finalize_checkpoint(checkpoint_path)

    def get_latest_checkpoint_path(self) -> str | None:
        steps = [int(path.name.removeprefix("step_")) for path in self.checkpoint_dir.glob("step_*")]
        return str(self.checkpoint_dir / f"step_{max(steps)}") if steps else None
