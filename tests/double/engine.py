"""vLLM's two engines, as far as NeMo-RL's workers and our guard use them. All they are asked is on record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

KV_TOKENS = 4096
NEW = 3
"""Tokens of an answer."""


_SAYS = {
    "war_attach": {"kv_tokens": KV_TOKENS},
    "war_process": {"kv_tokens": KV_TOKENS},
    "war_statistics": {},
    "war_save_state": None,
    "war_restore_state": None,
}
"""Answers of a worker's methods; of all others, that it is done."""


class RequestOutputKind(Enum):
    """In the place of vLLM's."""

    CUMULATIVE = 0
    DELTA = 1


@dataclass
class SamplingParams:
    """In the place of vLLM's."""

    max_tokens: int = 16
    temperature: float = 1.0
    extra_args: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def clone(self) -> SamplingParams:
        return deepcopy(self)


@dataclass
class Request:
    """What an engine was asked to generate."""

    prompt: Any
    params: SamplingParams


@dataclass
class _Engine:
    """What both have in common.

    Attributes:
        arguments: that it was made with.
        requests: all it was asked for.
        said: names of other methods that were called, in order, those of workers after a colon.
        refuses: whether its caches stay as they are when a reset is asked for.
        fails: raised by the next call of a worker's method, or request.
        cached: tokens of each prompt whose KV it says was there.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    refuses: bool = False
    fails: Exception | None = None
    cached: int = 0

    def _answer(self, prompt: Any, params: SamplingParams) -> Any:
        self.requests.append(Request(prompt, params))
        self._raise_if_it_fails()
        ids = prompt.get("prompt_token_ids", [0]) if isinstance(prompt, dict) else [0]
        tokens = [sum(ids) % 89 + 1] * min(NEW, params.max_tokens)
        logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in tokens]
        text = SimpleNamespace(token_ids=tokens, logprobs=logprobs, text="text", finish_reason="stop")
        return SimpleNamespace(
            outputs=[text], finished=True, prompt_token_ids=ids, num_cached_tokens=self.cached
        )

    def _rpc(self, method: str) -> list[Any]:
        self.said.append(f"worker: {method}")
        self._raise_if_it_fails()
        return [_SAYS.get(method, True)]

    def _reset(self, running: bool) -> bool:
        self.said.append("reset_prefix_cache, running ones too" if running else "reset_prefix_cache")
        return not self.refuses

    def _raise_if_it_fails(self) -> None:
        error, self.fails = self.fails, None
        if error is not None:
            raise error


class FakeAsyncLLM(_Engine):
    """In the place of `AsyncLLM`.

    Attributes:
        held: whether requests wait; set from any thread.
    """

    def __init__(self, arguments: dict[str, Any] | None = None) -> None:
        super().__init__(arguments or {})
        self.held = False
        self._paused = False

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        answer = self._answer(prompt, sampling_params)
        while self.held:
            await asyncio.sleep(0.001)
        yield answer

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple = (), kwargs: dict | None = None
    ) -> list[Any]:
        return self._rpc(method)

    async def is_paused(self) -> bool:
        return self._paused

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        self.said.append(f"pause_generation, {mode}")
        self._paused = True

    async def resume_generation(self) -> None:
        self.said.append("resume_generation")
        self._paused = False

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return self._reset(reset_running_requests)

    async def reset_mm_cache(self) -> None:
        self.said.append("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        self.said.append("reset_encoder_cache")

    async def sleep(self, level: int = 1) -> None:
        self.said.append("sleep")
        self._paused = True

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.said.append("wake_up")


class FakeLLMEngine:
    """In the place of `LLMEngine`."""

    def __init__(self, engine: FakeLLM) -> None:
        self._engine = engine
        self.model_config = SimpleNamespace(max_model_len=1024)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return self._engine._reset(reset_running_requests)

    def reset_mm_cache(self) -> None:
        self._engine.said.append("reset_mm_cache")

    def reset_encoder_cache(self) -> None:
        self._engine.said.append("reset_encoder_cache")


class FakeLLM(_Engine):
    """In the place of `LLM`."""

    def __init__(self, arguments: dict[str, Any] | None = None) -> None:
        super().__init__(arguments or {})
        self.llm_engine = FakeLLMEngine(self)

    def generate(
        self, prompts: Sequence[Any], sampling_params: Any = None, *, use_tqdm: bool = True
    ) -> list[Any]:
        alike = not isinstance(sampling_params, Sequence)
        each = [sampling_params] * len(prompts) if alike else sampling_params
        return [self._answer(prompt, params) for prompt, params in zip(prompts, each, strict=True)]

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple = (), kwargs: dict | None = None
    ) -> list[Any]:
        return self._rpc(method)

    def sleep(self, level: int = 1) -> None:
        self.said.append("sleep")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.said.append("wake_up")
