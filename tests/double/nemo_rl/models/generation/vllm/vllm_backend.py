from __future__ import annotations

from typing import Any


class VllmInternalWorkerExtension:
    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        pass

    def update_weights_via_ipc_zmq(self) -> bool:
        return True

    def update_weights_from_collective(self) -> bool:
        return True

    def nccl_reshard_refit(self) -> bool:
        return True

    def update_weights_from_decoded_sparse_payload(self, *payloads: bytes | str) -> dict[str, Any]:
        return {}

    def finish_sparse_delta_refit(self) -> dict[str, Any]:
        return {}


class VllmInternalWorkerExtensionWithCheckpointEngine(VllmInternalWorkerExtension):
    def update_weights_from_checkpoint_engine(self) -> bool:
        return True
