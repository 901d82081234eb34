"""What WAR adds to the engine arguments that NeMo-RL's worker made up.

Here and not in `vllm_kwargs`: NeMo-RL takes a drafter in the configuration for one with
weights of its own, and then loads the whole checkpoint instead of dummy weights.
"""

from __future__ import annotations

from typing import Any

from nemo_war.config import WarConfig

PROPOSER = "nemo_war.speculative.proposer.SuffixProposer"
_EXTENSIONS = "nemo_war.generation.nemo_rl.extension"
_OURS = {
    "VllmInternalWorkerExtension": "WarWorkerExtension",
    "VllmInternalWorkerExtensionWithCheckpointEngine": "WarWorkerExtensionWithCheckpointEngine",
}
"""Classes of ours by the name of NeMo-RL's that they extend."""


def prepare(arguments: dict[str, Any], war: WarConfig) -> None:
    """Add WAR's extension, and its drafter where it speculates.

    Raises:
        RuntimeError: this NeMo-RL gives its workers an extension that is not known here.
    """
    extension = arguments["worker_extension_cls"].rpartition(".")[2]
    if extension not in _OURS:
        raise RuntimeError(
            f"NeMo-RL's worker extension {arguments['worker_extension_cls']} is not one that WAR extends: "
            f"{', '.join(_OURS)}"
        )
    arguments["worker_extension_cls"] = f"{_EXTENSIONS}.{_OURS[extension]}"
    if war.speculative.enabled:
        arguments["speculative_config"] = {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": war.speculative.max_draft_tokens,
        }
        arguments["additional_config"] = {
            **(arguments.get("additional_config") or {}),
            "war": war.speculative.model_dump(mode="json"),
        }
