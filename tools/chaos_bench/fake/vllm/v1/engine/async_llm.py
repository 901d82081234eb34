"""The engine, as an asyncio client sees it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tokenizer import Tokenizer
from vllm.v1.core.sched.scheduler import EngineCoreOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.request import Request, checked_prompt

_SETTLE_S = 0.02
"""After a pause vLLM waits so long for outputs that are on their way."""


class AsyncLLM:
    """One engine, for the event loop it was made in."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self._loop = asyncio.get_running_loop()
        self._tokenizer = Tokenizer()
        self._outputs = OutputProcessor(self._tokenizer)
        self._names = itertools.count()
        self._core = EngineCore(
            vllm_config,
            lambda outputs: self._soon(self._process, outputs),
            lambda: self._soon(self._outputs.propagate_error, EngineDeadError()),
        )

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> AsyncLLM:
        """Start an engine.

        Raises:
            ValueError: the arguments do not fit each other.
            RuntimeError: it did not start.
        """
        return cls(engine_args.create_engine_config())

    @property
    def errored(self) -> bool:
        """Whether it is of no use any more."""
        return self._core.dead

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        return self.errored

    @property
    def dead_error(self) -> EngineDeadError:
        return EngineDeadError()

    def shutdown(self) -> None:
        """End the engine; may be called twice. Whoever still waits for it is told, which vLLM does not do."""
        self._core.shutdown()

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate a request; leaving the iterator aborts it.

        Args:
            prompt: `vllm.inputs.TokensPrompt`.
            sampling_params: how.
            request_id: as the client likes. What comes before its last slash is a request's seed, so that a
                client whose names end in something unique gets the same text again.

        Raises:
            VLLMValidationError: the request makes no sense.
            EngineDeadError: the engine is dead, or died.
            EngineGenerateError: anything else went wrong.
        """
        collector: RequestOutputCollector | None = None
        try:
            collector = self._add_request(prompt, sampling_params, request_id)
            finished = False
            while not finished:
                output = await collector.get()
                finished = output.finished
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            if collector is not None:
                await self.abort(collector.request_id, internal=True)
            raise
        except (EngineDeadError, VLLMClientError):
            raise
        except Exception as error:
            if collector is not None:
                await self.abort(collector.request_id, internal=True)
            raise EngineGenerateError from error

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests; who waits for them gets what there is. The engine's answer is not waited for."""
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        self._core.post("abort_requests", self._outputs.abort_requests(names, internal))

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop generating, before the next step.

        Args:
            mode: `keep` freezes what runs, `abort` ends it, `wait` lets it end. New requests wait.
            clear_cache: reset the prefix cache, too.
        """
        await self._call("pause_scheduler", mode, clear_cache)
        await asyncio.sleep(_SETTLE_S)

    async def resume_generation(self) -> None:
        """Go on."""
        await self._call("resume_scheduler")

    async def is_paused(self) -> bool:
        return await self._call("is_scheduler_paused")

    async def reset_mm_cache(self) -> None:
        await self._call("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        await self._call("reset_encoder_cache")

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all KV; False where requests run and are not to be reset."""
        return await self._call("reset_prefix_cache", reset_running_requests, reset_connector)

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple = (), kwargs: dict | None = None
    ) -> list[Any]:
        """Call a method of the worker.

        Raises:
            Exception: the method raised; the text is all that is left of it.
        """
        return await asyncio.wait_for(self._call("collective_rpc", method, args, kwargs or {}), timeout)

    async def check_health(self) -> None:
        """Raise EngineDeadError if it is dead."""
        if self.errored:
            raise self.dead_error

    def _add_request(self, prompt: Any, params: SamplingParams, request_id: str) -> RequestOutputCollector:
        if self.errored:
            raise EngineDeadError
        config = self.vllm_config
        tokens, salt = checked_prompt(prompt, config.model_config.max_model_len)
        seed = config.model_config.seed if params.seed is None else params.seed
        request = Request(
            f"{request_id}-{next(self._names):08x}",
            f"{seed}/{request_id.rpartition('/')[0] or request_id}",
            tokens,
            params.of_engine(
                config.model_config.eos_token_id, config.model_config.max_model_len - len(tokens)
            ),
            salt,
            config.cache_config.block_size,
        )
        collector = self._outputs.add_request(request, request_id)
        self._core.post("add_request", request)
        return collector

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await asyncio.wrap_future(self._core.call(method, *arguments))

    def _process(self, outputs: list[EngineCoreOutput]) -> None:
        if over := self._outputs.process_outputs(outputs):
            self._core.post("abort_requests", over)

    def _soon(self, function: Any, *arguments: Any) -> None:
        """Call something in the client's loop, from the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any longer
            self._loop.call_soon_threadsafe(function, *arguments)
