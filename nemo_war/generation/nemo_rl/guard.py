"""What stands in front of a NeMo-RL worker's vLLM engine: requests are salted, weight updates are refits.

NeMo-RL updates weights in five ways, and each of them ends in a call of the engine's
`collective_rpc`. Requests come by its workers' methods or by the HTTP server in the worker,
and all of them end in the engine's `generate`. Both are replaced on the one engine object,
so that nobody gets past: not a transport, not a server, not a version that adds one.

* A request is salted with the policy epoch that it begins in. Its KV cannot be found from
  another epoch, even where a reset failed.
* A call that changes weights freezes what runs, and preempts it, so that it goes on with KV
  computed anew; resets the caches; and begins a new epoch. A reset that vLLM does not confirm
  is an error, which NeMo-RL takes for a failed update.

Two defects of NeMo-RL at 7ea279ab are closed by this: asynchronous GRPO does not reset the
prefix cache after in-flight updates unless told so, and where it is told the reset is refused
while requests run, and the refusal dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from nemo_war.config import WarConfig
from nemo_war.generation.nemo_rl import arms, request
from nemo_war.generation.nemo_rl.call import CALL, Served
from nemo_war.metadata import TurnMetadata

WEIGHT_UPDATES = frozenset(
    {
        "update_weights_via_ipc_zmq",
        "update_weights_from_collective",
        "nccl_reshard_refit",
        "update_weights_from_checkpoint_engine",
        "finish_sparse_delta_refit",
    }
)
"""Methods of NeMo-RL's worker extension after which the weights are others."""

_log = logging.getLogger(__name__)


class StaleCacheError(RuntimeError):
    """The engine did not confirm that its KV caches are empty."""

    def __init__(self, epoch: int) -> None:
        super().__init__(
            f"vLLM did not confirm the reset of its caches after the update to policy epoch {epoch}: "
            "it must not serve, as KV of older weights may be left"
        )


@dataclass(slots=True)
class Requests:
    """Counts since the start, of requests that were answered.

    Attributes:
        turns: requests.
        mixed_turns: of these, those that began and ended under different policy epochs.
        prompt_tokens: of all prompts.
        cached_tokens: of these, those whose KV was there.
        output_tokens: generated.
        busy_seconds: time with any request under way, answered or not.
    """

    turns: int = 0
    mixed_turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    busy_seconds: float = 0.0


class _Guard:
    """What the two kinds of engines have in common.

    Attributes:
        epoch: policy epoch, a count of weight updates.
        learning: whether requests may enter the history; false for validation.
        requests: counts.
        generate: what stands in for the engine's.
        collective_rpc: likewise.
    """

    generate: Callable[..., Any]
    collective_rpc: Callable[..., Any]

    def __init__(self, llm: Any, war: WarConfig) -> None:
        """Stand in front of an engine from here on."""
        self._llm, self._war = llm, war
        self._generate = llm.generate
        self._collective_rpc = llm.collective_rpc
        self.epoch = 0
        self.learning = True
        self.requests = Requests()
        self._running, self._busy_since = 0, 0.0
        llm.generate = self.generate
        llm.collective_rpc = self.collective_rpc

    def _meant(self, params: Any, turn: TurnMetadata | None) -> Any:
        """Sampling parameters that say whose turn it is."""
        turn = turn or request.announced(params)
        if turn is None:
            return params
        return request.announcing(params, replace(turn, epoch=self.epoch, learn=turn.learn and self.learning))

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """A request is under way, or a batch of them."""
        now = time.monotonic()
        if not self._running:
            self._busy_since = now
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self.requests.busy_seconds += time.monotonic() - self._busy_since

    def _count(self, output: Any, began: int, output_tokens: int) -> None:
        """A request was answered; tell the call that sent it."""
        served = Served(began, self.epoch, output.num_cached_tokens or 0)
        self.requests.turns += 1
        self.requests.mixed_turns += served.began != served.ended
        self.requests.prompt_tokens += len(output.prompt_token_ids or ())
        self.requests.cached_tokens += served.cached_tokens
        self.requests.output_tokens += output_tokens
        if (call := CALL.get()) is not None:
            call.served.append(served)

    def _news(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """What the drafter is to hear of a new epoch: methods of its extension, with their arguments."""
        if self._war.speculative.enabled:
            yield "war_advance_epoch", (self.epoch,)
            if self._war.ab_every is not None:
                yield "war_enable_drafting", (arms.is_on(self.epoch, self._war.ab_every),)


class AsyncGuard(_Guard):
    """In front of an `AsyncLLM`."""

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        """`AsyncLLM.generate` for a request of the present epoch."""
        call, began, tokens = CALL.get(), self.epoch, 0
        params = self._meant(sampling_params, call.turns[0] if call and call.turns else None)
        salted, piecewise = request.salted(prompt, began), request.is_piecewise(params)
        with self._busy():
            async for output in self._generate(salted, params, request_id, **options):
                new = sum(len(each.token_ids) for each in output.outputs)
                tokens = tokens + new if piecewise else new
                if output.finished:  # now, as whoever reads the answer may not come back for the end
                    self._count(output, began, tokens)
                yield output

    async def collective_rpc(self, method: Any, *arguments: Any, **options: Any) -> Any:
        """`AsyncLLM.collective_rpc`; a refit where the method changes weights."""
        if method not in WEIGHT_UPDATES:
            return await self._collective_rpc(method, *arguments, **options)
        awake = not await self._llm.is_paused()  # an engine that sleeps runs nothing
        if awake:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
        try:
            return await self._collective_rpc(method, *arguments, **options)
        finally:  # an update that failed may have changed some weights
            await self._begin_epoch()
            if awake:
                await self._llm.resume_generation()

    async def reset(self) -> bool:
        """Make all KV unreachable, that of running requests included; whether vLLM confirms that."""
        llm = self._llm  # running requests are preempted first: they must not look for what is gone
        done = await llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        await llm.reset_mm_cache()
        await llm.reset_encoder_cache()
        return bool(done)

    async def _begin_epoch(self) -> None:
        self.epoch += 1
        if not await self.reset():
            raise StaleCacheError(self.epoch)
        try:
            for method, arguments in self._news():
                await self._collective_rpc(method, args=arguments)
        except Exception:
            _log.exception("the drafter did not hear of policy epoch %d; drafts may get worse", self.epoch)


class SyncGuard(_Guard):
    """In front of an `LLM`, which runs nothing between two calls."""

    def generate(self, prompts: Sequence[Any], sampling_params: Any, **options: Any) -> list[Any]:
        """`LLM.generate` for requests of the present epoch."""
        params = (
            sampling_params if isinstance(sampling_params, Sequence) else [sampling_params] * len(prompts)
        )
        call = CALL.get()
        turns = call.turns if call and call.turns else [None] * len(prompts)
        with self._busy():
            outputs = self._generate(
                [request.salted(prompt, self.epoch) for prompt in prompts],
                [self._meant(each, turn) for each, turn in zip(params, turns, strict=True)],
                **options,
            )
        for output in outputs:
            self._count(output, self.epoch, sum(len(each.token_ids) for each in output.outputs))
        return outputs

    def collective_rpc(self, method: Any, *arguments: Any, **options: Any) -> Any:
        """`LLM.collective_rpc`; a refit where the method changes weights."""
        if method not in WEIGHT_UPDATES:
            return self._collective_rpc(method, *arguments, **options)
        try:
            return self._collective_rpc(method, *arguments, **options)
        finally:  # an update that failed may have changed some weights
            self._begin_epoch()

    def reset(self) -> bool:
        """Make all KV unreachable; whether vLLM confirms that."""
        engine = self._llm.llm_engine
        done = engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        engine.reset_mm_cache()
        engine.reset_encoder_cache()
        return bool(done)

    def _begin_epoch(self) -> None:
        self.epoch += 1
        if not self.reset():
            raise StaleCacheError(self.epoch)
        try:
            for method, arguments in self._news():
                self._collective_rpc(method, args=arguments)
        except Exception:
            _log.exception("the drafter did not hear of policy epoch %d; drafts may get worse", self.epoch)
