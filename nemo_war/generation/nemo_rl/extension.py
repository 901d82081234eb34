"""NeMo-RL's vLLM worker extensions, and the drafter's."""

from __future__ import annotations

from nemo_rl.models.generation.vllm import vllm_backend
from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension

from nemo_war.generation.extension import WarExtension


class WarWorkerExtension(WarExtension, VllmInternalWorkerExtension):
    """For all refit transports but checkpoint engines."""


if hasattr(vllm_backend, "VllmInternalWorkerExtensionWithCheckpointEngine"):  # not so in NeMo-RL 0.7

    class WarWorkerExtensionWithCheckpointEngine(
        WarExtension, vllm_backend.VllmInternalWorkerExtensionWithCheckpointEngine
    ):
        """For checkpoint engines."""
