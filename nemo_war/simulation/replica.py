"""One engine with continuous batching and a prefix cache, in discrete time; it schedules as vLLM V1 does.

A step computes one token for each decoding request, then as much of the prompts as its
token budget has room for, first come first served. A request is let in when its whole
prompt fits the cache. Where a decoding request finds no block for its next token, the
request let in last is preempted: it goes back to the front of the queue and computes
anew what is not found in the cache by then.

Time is the caller's: a step is told when it starts and answers how long it takes.

A step's work depends on the requests that begin, end or fill a block in it. For the
others nothing is written: how far they are follows from the number of steps.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from nemo_war.errors import UserError
from nemo_war.generation.step_time import StepLoad, StepTimeModel
from nemo_war.simulation.prefix_cache import Lease, PrefixCache


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """Size and speed of an engine.

    Attributes:
        kv_blocks: blocks of the KV cache.
        block_size: tokens of a block.
        max_running: most requests in a step.
        max_batched_tokens: most tokens computed in a step.
        step_time: how long a step takes.
    """

    kv_blocks: int
    block_size: int
    max_running: int
    max_batched_tokens: int
    step_time: StepTimeModel

    def __post_init__(self) -> None:
        for name in ("kv_blocks", "block_size", "max_running", "max_batched_tokens"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"{name}={getattr(self, name)}: a replica has at least one; give a larger number"
                )
        if self.max_batched_tokens < self.max_running:
            raise UserError(
                f"max_batched_tokens={self.max_batched_tokens} is less than one token for each of"
                f" max_running={self.max_running} requests; raise it"
            )


@dataclass(frozen=True, slots=True)
class Request:
    """One turn.

    Attributes:
        name: unique among the requests on the replica.
        prompt_tokens: length of the prompt, at least 1.
        output_tokens: tokens it will generate, at least 1.
        blocks: uint64[n], chained hashes of the full blocks of prompt and output. The last
            output token is never computed on, so that a block it would fill is not needed.
    """

    name: str
    prompt_tokens: int
    output_tokens: int
    blocks: np.ndarray


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that is over.

    Attributes:
        name: of the request.
        cached_tokens: prompt tokens that were found in the cache when it was first let in.
        first_token_at, ended_at: seconds, on the caller's clock.
    """

    name: str
    cached_tokens: int
    first_token_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did.

    Attributes:
        seconds: how long it took; its tokens are there at its end.
        first_tokens: names of the requests that got their first token.
        finished: requests that got their last.
    """

    seconds: float
    first_tokens: tuple[str, ...]
    finished: tuple[Finished, ...]


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters since the start, and how things stand.

    Attributes:
        prompt_tokens: tokens of all prompts let in, each prompt once.
        cached_tokens: those of them found in the cache.
        prefilled_tokens: tokens computed in bulk: of prompts, and of outputs after a preemption.
        recomputed_tokens: those of them that had been computed here before, and were lost by
            eviction or preemption.
        output_tokens: tokens generated.
        preemptions: requests put back into the queue, by a reset too.
        steps: engine steps.
        running, waiting: requests, now.
        kv_use: share of the cache that is held by running requests, now.
    """

    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    recomputed_tokens: int
    output_tokens: int
    preemptions: int
    steps: int
    running: int
    waiting: int
    kv_use: float


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request from its arrival to its end.

    Attributes:
        outputs: tokens generated, up to when it was last let in or began to decode.
        lost: leading tokens that have been computed before and may have to be again.
        cached_tokens, first_token_at: None until known.
    """

    request: Request
    outputs: int = 0
    lost: int = 0
    cached_tokens: int | None = None
    first_token_at: float | None = None


@dataclass(slots=True, eq=False)
class _Run:
    """A sequence between being let in and its end or preemption.

    Attributes:
        number: place in the order in which runs were let in.
        target: tokens to compute before it decodes.
        computed: how many of them are.
        offset: once it decodes, tokens computed less steps of the replica; None before.
    """

    number: int
    sequence: _Sequence
    lease: Lease
    target: int
    computed: int
    offset: int | None = None


@dataclass(slots=True)
class _Batch:
    """What a step computes, as it is put together, and the runs whose prefill it completes."""

    requests: int
    tokens: int
    context: int
    ready: list[_Run] = field(default_factory=list)


class Replica:
    """A queue, a batch and a cache.

    Attributes:
        config: as given.
    """

    def __init__(self, config: ReplicaConfig) -> None:
        self.config = config
        self._cache = PrefixCache(config.kv_blocks)
        self._waiting: OrderedDict[str, _Sequence] = OrderedDict()
        self._running: dict[str, _Run] = {}  # in the order they were let in
        self._prefilling: _Run | None = None  # at most one, as only the last one let in finds no room
        self._decoding = self._context = 0  # decoding runs, and tokens computed of them
        # Decoding runs whose next token needs a block, and by the number of the step those that fill one
        # and those that end, in the order they were let in; what has left by then is passed over.
        self._full: list[_Run] = []
        self._fills: defaultdict[int, list[_Run]] = defaultdict(list)
        self._ends: defaultdict[int, list[_Run]] = defaultdict(list)
        self._steps = self._admitted = self._preemptions = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._prefilled_tokens = self._recomputed_tokens = self._output_tokens = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._running or self._waiting)

    @property
    def statistics(self) -> Statistics:
        """Counters and state."""
        return Statistics(
            self._prompt_tokens,
            self._cached_tokens,
            self._prefilled_tokens,
            self._recomputed_tokens,
            self._output_tokens,
            self._preemptions,
            self._steps,
            len(self._running),
            len(self._waiting),
            self._cache.held / self.config.kv_blocks,
        )

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: its name is taken, a length is wrong, or it could never fit the cache.
        """
        computed = request.prompt_tokens + request.output_tokens - 1
        if request.name in self._running or request.name in self._waiting:
            raise ValueError(f"request {request.name} is here already")
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError(f"request {request.name}: prompt and output have at least one token each")
        if len(request.blocks) < computed // self.config.block_size:
            raise ValueError(
                f"request {request.name}: {len(request.blocks)} hashes are not one for each block"
            )
        if self._blocks(computed) > self.config.kv_blocks:
            raise ValueError(
                f"request {request.name}: {computed} tokens never fit {self.config.kv_blocks} blocks"
            )
        self._waiting[request.name] = _Sequence(request)

    def cancel(self, name: str) -> bool:
        """Drop a request; false where there is none of this name, for example as it is over."""
        if self._waiting.pop(name, None) is not None:
            return True
        run = self._running.get(name)
        if run is not None:
            self._remove(run)
        return run is not None

    def generated(self, name: str) -> int:
        """Tokens that a request on the replica has generated so far."""
        run = self._running.get(name)
        return self._waiting[name].outputs if run is None else self._outputs(run)

    def step(self, now: float) -> StepResult:
        """Compute one step that starts now; what it brings is there `seconds` later.

        Raises:
            ValueError: the replica is not busy.
        """
        if not self.busy:
            raise ValueError("there is nothing to compute")
        preempted = self._allocate_decodes()
        batch = _Batch(self._decoding, self._decoding, self._context + self._decoding)
        self._prefill(batch, admit=not preempted)
        load = StepLoad(batch.requests, batch.tokens, batch.context)
        seconds = self.config.step_time.predict(load) / 1000
        return self._sample(batch.ready, now, seconds)

    def reset_cache(self) -> None:
        """Forget all KV, as after a change of weights; running requests are preempted and compute anew."""
        for run in list(reversed(self._running.values())):
            self._preempt(run)
        self._cache.reset()

    def check_integrity(self) -> bool:
        """Whether the books agree with each other; for tests."""
        runs = list(self._running.values())
        decoding = [run for run in runs if run.offset is not None]
        size = self.config.block_size
        return (
            self._cache.check_integrity([run.lease for run in runs])
            and all(run.lease.blocks == self._computed(run) // size for run in runs)
            and all(run.lease.blocks + run.lease.private == self._blocks(self._computed(run)) for run in runs)
            and self._decoding == len(decoding)
            and self._context == sum(map(self._computed, decoding))
            and [run for run in runs if run.offset is None] == runs[len(decoding) :]
            and runs[len(decoding) :] == [self._prefilling] * (self._prefilling is not None)
            and not self._running.keys() & self._waiting.keys()
            and len(runs) <= self.config.max_running
        )

    def _allocate_decodes(self) -> bool:
        """Blocks for the next token of each decoding run; whether runs were preempted for it.

        A block that this step fills is findable from now on, for what is let in by this step
        too. Run by run, as a block that is dropped for another run's is free for the runs behind.
        """
        step, size, preemptions = self._steps + 1, self.config.block_size, self._preemptions
        concerned, self._full = {*self._full, *self._fills.pop(step, ())}, []
        for run in sorted(concerned, key=attrgetter("number")):
            if self._computed(run) % size == 0:
                while self._is_running(run) and not self._cache.take(run.lease, 1):
                    self._preempt(next(reversed(self._running.values())))
            if self._is_running(run) and (self._computed(run) + 1) % size == 0:
                self._cache.commit(run.lease, (self._computed(run) + 1) // size)
                self._full.append(run)
                self._fills[step + size].append(run)
        return self._preemptions > preemptions

    def _prefill(self, batch: _Batch, admit: bool) -> None:
        budget = self.config.max_batched_tokens
        if self._prefilling is not None and batch.tokens < budget:
            admit = self._advance(self._prefilling, batch) and admit
        while admit and self._prefilling is None and self._waiting and batch.tokens < budget:
            run = self._admit() if len(self._running) < self.config.max_running else None
            if run is None:
                return
            self._advance(run, batch)

    def _admit(self) -> _Run | None:
        """Let in the request at the front of the queue, if all it has to compute fits the cache."""
        name, sequence = next(iter(self._waiting.items()))
        request, size = sequence.request, self.config.block_size
        target = request.prompt_tokens + sequence.outputs
        findable = (target - 1) // size  # the last token is computed in any case, to sample from it
        lease = self._cache.acquire(request.blocks, findable, self._blocks(target))
        if lease is None:
            return None
        del self._waiting[name]
        found = lease.blocks
        known = found + self._cache.evicted(request.blocks, found, findable)
        sequence.lost = max(sequence.lost, known * size)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = found * size
            self._prompt_tokens += request.prompt_tokens
            self._cached_tokens += found * size
        self._admitted += 1
        run = self._running[name] = _Run(self._admitted, sequence, lease, target, found * size)
        return run

    def _advance(self, run: _Run, batch: _Batch) -> bool:
        """Compute as much of a run's prefill as the step has room for; false: it is preempted instead."""
        start = run.computed
        end = min(run.target, start + self.config.max_batched_tokens - batch.tokens)
        if not self._cache.take(run.lease, self._blocks(end) - run.lease.blocks - run.lease.private):
            self._preempt(run)  # it is the last one let in
            return False
        self._cache.commit(run.lease, end // self.config.block_size)
        run.computed = end
        self._prefilled_tokens += end - start
        self._recomputed_tokens += max(0, min(end, run.sequence.lost) - start)
        batch.requests += 1
        batch.tokens += end - start
        batch.context += end
        self._prefilling = run if end < run.target else None
        if end == run.target:
            batch.ready.append(run)
        return True

    def _sample(self, ready: list[_Run], now: float, seconds: float) -> StepResult:
        """A token for each decoding run and each whose prefill is complete."""
        self._steps += 1
        self._output_tokens += self._decoding + len(ready)
        self._context += self._decoding
        over = [run for run in self._ends.pop(self._steps, ()) if self._is_running(run)]
        first = []
        for run in ready:
            sequence = run.sequence
            sequence.outputs += 1
            if sequence.first_token_at is None:
                sequence.first_token_at = now + seconds
                first.append(sequence.request.name)
            if sequence.outputs == sequence.request.output_tokens:
                over.append(run)
            else:
                self._decode(run)
        finished = tuple(self._finish(run, now + seconds) for run in over)
        return StepResult(seconds, tuple(first), finished)

    def _decode(self, run: _Run) -> None:
        """From the next step on the run computes one token each."""
        run.offset = run.computed - self._steps
        self._decoding += 1
        self._context += run.computed
        remaining = run.sequence.request.output_tokens - run.sequence.outputs
        self._ends[self._steps + remaining].append(run)
        room = -run.computed % self.config.block_size
        if room:
            self._fills[self._steps + room].append(run)
        else:
            self._full.append(run)
            self._fills[self._steps + self.config.block_size].append(run)

    def _finish(self, run: _Run, at: float) -> Finished:
        self._remove(run)
        sequence = run.sequence
        assert sequence.cached_tokens is not None
        assert sequence.first_token_at is not None
        return Finished(sequence.request.name, sequence.cached_tokens, sequence.first_token_at, at)

    def _preempt(self, run: _Run) -> None:
        sequence, name = run.sequence, run.sequence.request.name
        sequence.lost = max(sequence.lost, self._computed(run))
        sequence.outputs = self._outputs(run)
        self._remove(run)
        self._waiting[name] = sequence
        self._waiting.move_to_end(name, last=False)
        self._preemptions += 1

    def _remove(self, run: _Run) -> None:
        self._cache.release(run.lease)
        del self._running[run.sequence.request.name]
        if run is self._prefilling:
            self._prefilling = None
        if run.offset is not None:
            self._decoding -= 1
            self._context -= self._computed(run)

    def _is_running(self, run: _Run) -> bool:
        return self._running.get(run.sequence.request.name) is run

    def _computed(self, run: _Run) -> int:
        return run.computed if run.offset is None else run.offset + self._steps

    def _outputs(self, run: _Run) -> int:
        if run.offset is None:
            return run.sequence.outputs
        return run.offset + self._steps - run.sequence.request.prompt_tokens + 1

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)
