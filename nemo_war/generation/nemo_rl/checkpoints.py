"""What WAR learned, in NeMo-RL's checkpoints: `step_N/nemo_war/`, written and read with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_rl.utils.checkpoint import CheckpointManager

from nemo_war.errors import UserError
from nemo_war.generation.nemo_rl.generation import WarGeneration, living

FOLDER = "nemo_war"


class WarCheckpointManager(CheckpointManager):
    """A drop-in for `CheckpointManager`."""

    @staticmethod
    def get_resume_paths(last_checkpoint_path: Any, **options: Any) -> Any:
        """NeMo-RL's; also has generations go on with what was learned, now or once they are there.

        Raises:
            UserError: see `WarGeneration.restore`.
        """
        if last_checkpoint_path:
            WarGeneration.resumed = Path(last_checkpoint_path) / FOLDER
            for generation in living:
                generation.restore()
        return CheckpointManager.get_resume_paths(last_checkpoint_path, **options)

    def init_tmp_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        """NeMo-RL's; what was learned is written first. Where that fails, it is said and no more."""
        path = super().init_tmp_checkpoint(*arguments, **options)
        for generation in living:
            try:
                generation.save(Path(path) / FOLDER)
            except UserError as error:
                print(f"nemo_war: what was learned is not in this checkpoint: {error}", flush=True)
        return path
