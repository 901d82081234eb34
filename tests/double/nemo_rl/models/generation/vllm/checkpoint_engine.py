from __future__ import annotations

from typing import Any


class VllmCheckpointEngineRpcMixin:
    def checkpoint_engine_rpc(self, checkpoint_method: str, method_args: tuple[Any, ...] = ()) -> Any:
        answers = self.llm.collective_rpc(checkpoint_method, args=method_args)
        return all(answers) if checkpoint_method == "update_weights_from_checkpoint_engine" else answers


class VllmAsyncCheckpointEngineRpcMixin:
    async def checkpoint_engine_rpc_async(
        self, checkpoint_method: str, method_args: tuple[Any, ...] = ()
    ) -> Any:
        answers = await self.llm.collective_rpc(checkpoint_method, args=method_args)
        return all(answers) if checkpoint_method == "update_weights_from_checkpoint_engine" else answers
