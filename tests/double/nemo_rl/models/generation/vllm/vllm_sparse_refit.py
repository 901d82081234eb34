from __future__ import annotations

import asyncio
from typing import Any


class VllmSparseRefitReceiver:
    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._refit_async_loop: asyncio.AbstractEventLoop | None = None

    def _refit_collective_rpc(self, method: str, args: tuple[Any, ...]) -> Any:
        answers = self._worker.llm.collective_rpc(method, args=args)
        if not self._worker.cfg["vllm_cfg"]["async_engine"]:
            return answers
        assert self._refit_async_loop is not None
        return asyncio.run_coroutine_threadsafe(answers, self._refit_async_loop).result()
