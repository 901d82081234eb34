from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import ray
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.interfaces import verify_right_padding
from nemo_rl.models.generation.vllm.checkpoint_engine import VllmAsyncCheckpointEngineRpcMixin
from nemo_rl.models.generation.vllm.vllm_worker import BaseVllmGenerationWorker, answer_of, prompts_of

from tests.double.engine import FakeAsyncLLM


class VllmAsyncGenerationWorkerImpl(VllmAsyncCheckpointEngineRpcMixin, BaseVllmGenerationWorker):
    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        self.llm = FakeAsyncLLM(llm_kwargs)

    def _setup_vllm_openai_api_server(self, app: Any) -> Any:
        return app

    async def post_init_async(self) -> None:
        await self.llm.collective_rpc("report_device_id", args=())

    async def report_dp_openai_server_base_url(self) -> str | None:
        return "http://replica/v1" if self.cfg["vllm_cfg"].get("expose_http_server") else None

    async def get_reserved_url(self) -> str | None:
        return await self.report_dp_openai_server_base_url()

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
        verify_right_padding(data, self.cfg["_pad_token_id"])
        (prompt,) = prompts_of(data)
        output = await asyncio.create_task(self._output(prompt, self._build_sampling_params(greedy=greedy)))
        yield 0, answer_of(prompt, output)

    async def generate_text_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
        (prompt,) = data["prompts"]
        output = await asyncio.create_task(self._output(prompt, self._build_sampling_params(greedy=greedy)))
        yield 0, BatchedDataDict({"texts": [output.outputs[0].text]})

    async def prepare_refit_info_async(self, state_dict_info: dict[str, Any]) -> None:
        await self.llm.collective_rpc("prepare_refit_info", args=(state_dict_info,))

    async def update_weights_via_ipc_zmq_async(self) -> bool:
        return await self._update("update_weights_via_ipc_zmq")

    async def update_weights_from_collective_async(self) -> bool:
        return await self._update("update_weights_from_collective")

    async def nccl_reshard_refit_async(self) -> bool:
        return await self._update("nccl_reshard_refit")

    async def reset_prefix_cache_async(self) -> None:
        await self.llm.reset_prefix_cache()

    async def sleep_async(self) -> None:
        await self.llm.reset_prefix_cache()
        await self.llm.sleep(level=1)

    async def wake_up_async(self, **kwargs: Any) -> None:
        await self.llm.wake_up(**kwargs)

    async def _output(self, prompt: Any, params: Any) -> Any:
        outputs = self.llm.generate(prompt=prompt, sampling_params=params, request_id=str(uuid4()))
        async for output in outputs:
            last = output
        return last

    async def _update(self, method: str) -> bool:
        try:
            return all(await self.llm.collective_rpc(method, args=()))
        except Exception:
            return False


@ray.remote
class VllmAsyncGenerationWorker(VllmAsyncGenerationWorkerImpl):
    pass
