"""NeMo-RL's worker extensions on a machine without a GPU, with weights from host memory."""

from __future__ import annotations

import os
from typing import Any

from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension

from nemo_war.generation.extension import RefitExtension
from nemo_war.generation.nemo_rl.extension import WarWorkerExtension


class _OnCpu:
    """What needs a GPU, without one."""

    def bind_numa(self) -> bool:
        return True

    def report_device_id(self) -> str:
        return f"cpu-{os.getpid()}"

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """Takes the file that the next update is to come from, in place of names and shapes."""
        self.next_weights = state_dict_info["file"]

    def update_weights_from_collective(self) -> bool:
        RefitExtension.war_load_weights(self, self.next_weights)
        return True


class Stock(_OnCpu, VllmInternalWorkerExtension):
    pass


class War(_OnCpu, WarWorkerExtension):
    pass
