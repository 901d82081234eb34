"""Which requests a step computes, and what becomes of them: vLLM's scheduler with nothing but text in mind.

First come, first served. Running requests go first, each with all it has to compute as far as the
step's budget goes. A waiting one is let in when the whole of it fits the cache. Where a
running one finds no block, the last one let in is preempted, computes anew later, and nobody is let in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request, RequestStatus


class PauseState(Enum):
    """What is scheduled: everything, what runs already, or nothing."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


@dataclass(slots=True)
class ScheduledRequest:
    """A request's part of a step: `num_tokens` from `start` on are computed, the draft at the end of them.

    Attributes:
        let_in: whether it waited until this step.
    """

    request: Request
    start: int
    num_tokens: int
    spec_token_ids: list[int]
    let_in: bool


@dataclass(slots=True)
class SchedulerOutput:
    """A step. `finished_req_ids` are over since the last one."""

    finished_req_ids: set[str]
    scheduled: list[ScheduledRequest] = field(default_factory=list)


@dataclass(slots=True)
class Sampled:
    """What a step sampled for a request; nothing while its prompt is not computed in full."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class EngineCoreOutput:
    """What the client is told of a request."""

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    new_logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0


class Scheduler:
    """The queues.

    Attributes:
        requests: all that are not over, by id.
        running: in the order they were let in.
        waiting: in the order they will be let in.
        pool: the KV cache.
        pause_state: what may be scheduled.
        num_preemptions: since the start.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._limits, self._cache = config.scheduler_config, config.cache_config
        self._max_model_len = config.model_config.max_model_len
        self.pool = BlockPool(config.cache_config.num_gpu_blocks)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.pause_state = PauseState.UNPAUSED
        self.num_preemptions = 0
        self._finished: set[str] = set()

    def add_request(self, request: Request) -> None:
        """Queue it."""
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def finish_requests(self, request_ids: Iterable[str] | None) -> list[str]:
        """Drop requests, None for all; return those that were not over already."""
        wanted = list(self.requests) if request_ids is None else request_ids
        dropped = [self.requests[name] for name in wanted if name in self.requests]
        for request in dropped:
            (self.running if request.status is RequestStatus.RUNNING else self.waiting).remove(request)
            self._free(request)
        return [request.request_id for request in dropped]

    def has_work(self) -> bool:
        """Whether a step has anything to do, if only to tell the worker what is over."""
        runs = self.running and self.pause_state is not PauseState.PAUSED_ALL
        waits = self.waiting and self.pause_state is PauseState.UNPAUSED
        return bool(runs or waits or self._finished)

    def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool = False) -> bool:
        """Forget all KV.

        Args:
            reset_running_requests: preempt what runs first; otherwise nothing happens while anything does.
            reset_connector: there is none.

        Returns:
            Whether the cache is empty now.
        """
        while reset_running_requests and self.running:
            self._preempt(self.running.pop())
        return self.pool.reset()

    def schedule(self) -> SchedulerOutput:
        """Put a step together; what it computes counts as computed from now on."""
        output = SchedulerOutput(self._finished)
        self._finished = set()
        if self.pause_state is PauseState.PAUSED_ALL:
            return output
        preemptions = self.num_preemptions
        budget = self._schedule_running(output, self._limits.max_num_batched_tokens)
        if self.pause_state is PauseState.UNPAUSED and self.num_preemptions == preemptions:
            self._schedule_waiting(output, budget)
        return output

    def update_from_output(
        self, output: SchedulerOutput, sampled: Mapping[str, Sampled]
    ) -> list[EngineCoreOutput]:
        """Take in what a step sampled; tokens behind a request's end are dropped."""
        told = []
        for each in output.scheduled:
            request, new = each.request, sampled[each.request.request_id]
            if not new.tokens:
                continue
            request.num_computed_tokens -= len(each.spec_token_ids) - (len(new.tokens) - 1)
            reason, kept = None, 0
            while reason is None and kept < len(new.tokens):
                request.append((new.tokens[kept],))
                reason, kept = self._stop(request), kept + 1
            told.append(
                EngineCoreOutput(
                    request.request_id, new.tokens[:kept], new.logprobs[:kept], reason,
                    request.stop_reason, request.num_cached_tokens or 0,
                )
            )  # fmt: skip
            if reason:
                self.running.remove(request)
                self._free(request)
        return told

    def update_draft_token_ids(self, drafts: Mapping[str, list[int]]) -> None:
        """Verify these in the next step; not of a request that has more than a token to compute."""
        for name, draft in drafts.items():
            request = self.requests.get(name)
            if request is not None and request.num_computed_tokens == len(request.tokens) - 1:
                request.spec_token_ids = draft

    def check_integrity(self) -> bool:
        """Whether the books agree with each other; for tests."""
        held = [block for request in self.requests.values() for block in request.blocks]
        queued = {request.request_id for request in (*self.running, *self.waiting)}
        return (
            self.pool.check_integrity(held)
            and queued == self.requests.keys()
            and len(queued) == len(self.running) + len(self.waiting)
            and all(request.status is RequestStatus.RUNNING for request in self.running)
            and not any(request.blocks for request in self.waiting)
        )

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        """Schedule what runs, and return what is left of the budget."""
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            computed = request.num_computed_tokens
            num_tokens = min(
                len(request.tokens) + len(request.spec_token_ids) - computed,
                budget,
                self._max_model_len - 1 - computed,  # the token that is sampled needs a place, too
            )
            while not self._allocate(request, computed + num_tokens):
                self._preempt(victim := self.running.pop())
                if victim is request:
                    return budget
            budget -= num_tokens
            self._schedule(output, request, num_tokens, let_in=False)
            index += 1
        return budget

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        size = self._cache.block_size
        while self.waiting and budget and len(self.running) < self._limits.max_num_seqs:
            request = self.waiting[0]
            length = len(request.tokens)
            found = []
            if self._cache.enable_prefix_caching:
                # The last token is computed in any case, to sample from it.
                found = self.pool.find(request.block_hashes[: (length - 1) // size])
            idle = sum(not block.ref_cnt for block in found)
            if _blocks(length, size) - len(found) > self.pool.num_free_blocks - idle:
                return
            self.running.append(self.waiting.popleft())
            self.pool.touch(found)
            request.status, request.blocks = RequestStatus.RUNNING, found
            request.num_computed_tokens = len(found) * size
            if request.num_cached_tokens is None:
                request.num_cached_tokens = request.num_computed_tokens
            num_tokens = min(length - request.num_computed_tokens, budget)
            self._allocate(request, request.num_computed_tokens + num_tokens)
            budget -= num_tokens
            self._schedule(output, request, num_tokens, let_in=True)

    def _schedule(self, output: SchedulerOutput, request: Request, num_tokens: int, let_in: bool) -> None:
        start = request.num_computed_tokens
        drafted = max(0, start + num_tokens - len(request.tokens))
        output.scheduled.append(
            ScheduledRequest(request, start, num_tokens, request.spec_token_ids[:drafted], let_in)
        )
        request.spec_token_ids = []
        request.num_computed_tokens += num_tokens

    def _allocate(self, request: Request, end: int) -> bool:
        """Blocks for the first `end` tokens; full ones can be found from now on, drafts not counted."""
        size = self._cache.block_size
        missing = _blocks(end, size) - len(request.blocks)
        if missing > self.pool.num_free_blocks:
            return False
        request.blocks += self.pool.take(max(0, missing))
        if self._cache.enable_prefix_caching:
            full = min(end, len(request.tokens)) // size
            for place in range(request.num_computed_tokens // size, full):
                self.pool.name(request.blocks[place], request.block_hashes[place])
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the front of the queue; it is not in `running` any more."""
        self.pool.free(request.blocks)
        request.status, request.blocks = RequestStatus.PREEMPTED, []
        request.num_computed_tokens, request.spec_token_ids = 0, []
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _free(self, request: Request) -> None:
        self.pool.free(request.blocks)
        request.status, request.blocks = RequestStatus.FINISHED, []
        del self.requests[request.request_id]
        self._finished.add(request.request_id)

    def _stop(self, request: Request) -> str | None:
        """Why a request ends with its last token, if it does."""
        params, token = request.params, request.tokens[-1]
        if request.num_output_tokens < params.min_tokens:
            return None
        if token == params.eos_token_id:
            return "stop"
        if token in (params.stop_token_ids or ()):
            request.stop_reason = token
            return "stop"
        assert params.max_tokens is not None
        full = len(request.tokens) >= self._max_model_len
        return "length" if full or request.num_output_tokens >= params.max_tokens else None


def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)
