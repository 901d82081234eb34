"""NeMo-RL's vLLM workers with WAR's engine arguments, guard and drafter calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import ray
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

from nemo_war.config import WarConfig
from nemo_war.generation.drafter_host import DrafterHost
from nemo_war.generation.nemo_rl import engine_arguments, http_turns
from nemo_war.generation.nemo_rl.block import war_of
from nemo_war.generation.nemo_rl.call import CALL, Call
from nemo_war.generation.nemo_rl.guard import AsyncGuard, SyncGuard

TURNS = "war_turns"
"""Key of a batch's `TurnMetadata`, a list; taken out before NeMo-RL's own code sees the batch."""
SERVED = "war_served"
"""Key of what became of an answer's requests, a list of `Served`."""


class Host(DrafterHost):
    """The drafter of one worker's engine, and what the guard in front of it knows."""

    def __init__(self, number: int, guard: AsyncGuard | SyncGuard, war: WarConfig) -> None:
        super().__init__(number, war.speculative.enabled)
        self._guard, self._war = guard, war
        self._imported = 0

    async def call(self, method: str, *arguments: Any) -> Any:
        """See `DrafterHost.call`."""
        answers = self._guard.collective_rpc(method, args=arguments)
        return (await answers if asyncio.iscoroutine(answers) else answers)[0]

    async def start(self) -> dict[str, Any]:
        """Prove that the drafter is active; facts of the engine's process and KV cache."""
        facts = await self.call("war_attach" if self.speculates else "war_process")
        await self.restore_history(self._war.speculative.history)
        return facts

    async def epoch(self) -> int:
        """Policy epoch, a count of weight updates."""
        return self._guard.epoch

    async def set_learning(self, learning: bool) -> None:
        """Whether requests that are sent from here on may enter the history."""
        self._guard.learning = learning

    async def import_history(self, blob: Any) -> int:
        """See `DrafterHost.import_history`."""
        news = await super().import_history(blob)
        self._imported += news
        return news

    async def statistics(self) -> dict[str, Any]:
        """Counters since the start, of the drafter and of requests; also the policy epoch."""
        own = {"epoch": self._guard.epoch, "imported_trajectories": self._imported}
        return await super().statistics() | asdict(self._guard.requests) | own


class WarAsyncWorkerImpl(VllmAsyncGenerationWorkerImpl):
    """An asynchronous engine."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        war = war_of(self.cfg)
        engine_arguments.prepare(llm_kwargs, war)
        super()._create_engine(llm_kwargs)
        self._guard = AsyncGuard(self.llm, war)
        self._host = Host(llm_kwargs["seed"], self._guard, war)

    def _setup_vllm_openai_api_server(self, app: Any) -> Any:
        app = super()._setup_vllm_openai_api_server(app)
        http_turns.install(app, self.llm)
        return app

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
        """NeMo-RL's, by a request that says whose turn it is."""
        call = _call(data)
        async for index, answer in super().generate_async(data, greedy):
            answer[SERVED] = call.served
            yield index, answer

    async def generate_text_async(self, data: Any, greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
        """NeMo-RL's, likewise."""
        _call(data)
        async for answer in super().generate_text_async(data, greedy):
            yield answer

    async def reset_prefix_cache_async(self) -> bool:
        """NeMo-RL's, for running requests too, and with an answer: whether the caches are empty."""
        await super().reset_prefix_cache_async()
        return await self._guard.reset()

    async def war(self, method: str, *arguments: Any) -> Any:
        """Call a method of `Host`."""
        return await getattr(self._host, method)(*arguments)


class WarSyncWorkerImpl(VllmGenerationWorkerImpl):
    """A synchronous engine."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        war = war_of(self.cfg)
        engine_arguments.prepare(llm_kwargs, war)
        super()._create_engine(llm_kwargs)
        self._guard = SyncGuard(self.llm, war)
        self._host = Host(llm_kwargs["seed"], self._guard, war)

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """NeMo-RL's, by requests that say whose turns they are."""
        call = _call(data)
        answers = super().generate(data, greedy)
        answers[SERVED] = call.served
        return answers

    def generate_text(self, data: Any, greedy: bool = False) -> Any:
        """NeMo-RL's, likewise."""
        _call(data)
        return super().generate_text(data, greedy)

    def reset_prefix_cache(self) -> bool:
        """NeMo-RL's, with an answer: whether the caches are empty."""
        super().reset_prefix_cache()
        return self._guard.reset()

    def war(self, method: str, *arguments: Any) -> Any:
        """Call a method of `Host`."""
        return asyncio.run(getattr(self._host, method)(*arguments))


def _call(data: Any) -> Call:
    """The call that this batch is, from here on in this task or thread."""
    call = Call(data.pop(TURNS, None))
    CALL.set(call)
    return call


@ray.remote
class WarAsyncWorker(WarAsyncWorkerImpl):
    """The actor."""


@ray.remote
class WarSyncWorker(WarSyncWorkerImpl):
    """The actor."""
