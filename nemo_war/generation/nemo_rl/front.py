"""Places the turns of one process, and has its replicas share what they learned.

NeMo-RL asks from several threads, each with an event loop of its own, and from several
processes that hold copies of one generation object. So there is one `Front` in each
process, with a thread and a loop of its own, and one scheduler for all of them, a Ray
actor that they find by name.

NeMo-RL tells nobody here of steps or refits. A front finds out: the first turn after a pause
asks the replicas for their policy epoch, and each answer says under which it was generated.
In a pause, which is between the rollouts of two steps, histories are exchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np

from nemo_war.config import WarConfig
from nemo_war.generation.history_exchange import HistoryExchange
from nemo_war.generation.nemo_rl import arms
from nemo_war.generation.nemo_rl.turns import Turn, Turns
from nemo_war.generation.scheduling.dispatcher import SharedDispatcher
from nemo_war.generation.scheduling.link import Link
from nemo_war.metadata import TurnMetadata
from nemo_war.routing.facts import Outcome, Placement, ReplicaFacts, TurnFacts
from nemo_war.snapshot import State

_LOOK_S = 5.0
"""Longest a first turn waits for the replicas' epochs. That is one step of a busy engine, or nothing."""
_PAUSE_S = 0.5
"""Time without a turn after which a step's rollouts are taken to be over; one too early does no harm."""
_GLANCE_S = 1.0
"""Time between two looks of a waiting turn at whether any replica is left."""

_SUSPICION_S = 30.0
"""Time for which a replica that failed a turn is given no other; to find out what it has is NeMo-RL's."""

_log = logging.getLogger(__name__)


class Replicas(Protocol):
    """The way to the replicas; see `fleet.Fleet`."""

    @property
    def size(self) -> int:
        """How many there are."""

    async def ask(self, number: int, method: str, *arguments: Any) -> Any:
        """Call a method of `worker.Host` on one of them."""


class Front:
    """The turns of one process. All methods may be called from any thread."""

    def __init__(
        self,
        war: WarConfig,
        replicas: Replicas,
        facts: Callable[[], Sequence[ReplicaFacts]],
        connect: Callable[[], Link],
        share: Callable[[Any], Any],
    ) -> None:
        """Start the thread.

        Args:
            war: the configuration.
            replicas: the way to them.
            facts: the replicas as they are now.
            connect: makes the way to the scheduler, in the thread's loop.
            share: puts an array where all replicas can read it.
        """
        self._war, self._replicas, self._facts = war, replicas, facts
        self._epoch = self._running = 0
        self._stopping = False
        self._looking: asyncio.Task[None] | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._suspects: dict[int, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._callers: WeakSet[asyncio.Task[Any]] = WeakSet()
        self.turns = Turns(self._ended)
        self.learning = True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="nemo-war-front", daemon=True)
        self._thread.start()
        self._dispatcher, self._exchange = self._do(self._start(connect, share))

    @asynccontextmanager
    async def turn(self, prompt: np.ndarray, max_new_tokens: int) -> AsyncIterator[Turn]:
        """A turn, placed; the block generates it, and enters its answer.

        Its replica is None where NeMo-RL is to choose one, or to say that there is none.

        Args:
            prompt: int32[n], all of it.
            max_new_tokens: most that it may generate.
        """
        turn = self.turns.begin(prompt, self.learning)
        self._watch_caller(turn.metadata.trajectory)
        placement: Placement | None = None
        try:
            facts = TurnFacts(turn.metadata, len(prompt), max_new_tokens, prompt)
            placement = await self._ask(facts)
            if placement is not None:
                turn.replica = placement.replica
                turn.metadata = placement.told(turn.metadata)
            yield turn
        finally:
            self.turns.finish(turn)
            self._loop.call_soon_threadsafe(self._leave, turn, placement)

    @contextmanager
    def batch(self, prompts: Sequence[np.ndarray]) -> Iterator[list[Turn]]:
        """The turns of a batch, which the block places and generates; as for `turn`."""
        self._loop.call_soon_threadsafe(self._arrive)
        turns: list[Turn] = []
        try:
            self._do(self._looked())
            turns += [self.turns.begin(prompt, self.learning) for prompt in prompts]
            yield turns
        finally:
            for turn in turns:
                self.turns.finish(turn)
            self._loop.call_soon_threadsafe(self._leave_together, turns)

    @property
    def on(self) -> bool:
        """Whether WAR places turns in the present policy epoch."""
        return arms.is_on(self._epoch, self._war.ab_every)

    def saw(self, epoch: int) -> None:
        """A replica answered in this policy epoch."""
        if epoch > self._epoch:
            self._loop.call_soon_threadsafe(self._began, epoch)

    def learned(self, turns: Sequence[tuple[TurnMetadata, int, int]]) -> None:
        """Others learned what came by HTTP: turns, the replicas that generated them, and tokens known now."""
        if turns:
            self._loop.call_soon_threadsafe(self._take_in, turns)

    def failed(self, replica: int) -> None:
        """A turn failed for this replica's sake: the next ones, that one again among them, go elsewhere."""
        self._suspects[replica] = time.monotonic() + _SUSPICION_S

    def state(self) -> State | None:
        """What placement learned, for a checkpoint; None where there is nothing, or it cannot be had."""
        return self._do(self._dispatcher.state())

    def stop(self) -> None:
        """Let go of the scheduler, and end the thread; may be called twice. Turns that wait have an error."""
        if self._thread.is_alive():
            self._do(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    # --- from other threads ----------------------------------------------------------------

    def _do(self, work: Any) -> Any:
        """What a coroutine of the thread's loop returns."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _ask(self, turn: TurnFacts) -> Placement | None:
        """Wait for a placement; one that comes when nobody waits any more is given back."""
        claim: Future[Placement | None] = Future()
        self._loop.call_soon_threadsafe(self._place, turn, claim)
        try:
            return await asyncio.wrap_future(claim)
        except asyncio.CancelledError:
            if not claim.cancel():
                claim.add_done_callback(self._give_back)
            raise

    def _give_back(self, claim: Future[Placement | None]) -> None:
        placement = None if claim.exception() else claim.result()
        if placement is not None:
            self._loop.call_soon_threadsafe(self._dispatcher.finish, placement.ticket, None)

    def _watch_caller(self, trajectory: str) -> None:
        """A trajectory is over when the task is that asks for its turns. NeMo-RL's loop has one for each."""
        task = asyncio.current_task()
        if task is not None and task not in self._callers:
            self._callers.add(task)
            task.add_done_callback(lambda _: self._ended(trajectory))

    def _ended(self, trajectory: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody wants to know
            self._loop.call_soon_threadsafe(self._dispatcher.end, trajectory)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    # --- in the thread's loop --------------------------------------------------------------

    async def _start(
        self, connect: Callable[[], Link], share: Callable[[Any], Any]
    ) -> tuple[SharedDispatcher, HistoryExchange]:
        config = self._war.speculative.history.exchange
        exchange = HistoryExchange(config, range(self._replicas.size), self._replicas.ask, share)
        if self._war.speculative.enabled:
            self._keep(self._exchange_live(exchange))
        return SharedDispatcher(connect(), self._facts, time.monotonic), exchange

    async def _stop(self) -> None:
        self._stopping = True
        if self._pause is not None:
            self._pause.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._dispatcher.stop()

    def _keep(self, work: Any) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _place(self, turn: TurnFacts, claim: Future[Placement | None]) -> None:
        self._arrive()
        task = self._keep(self._placement(turn, claim))
        claim.add_done_callback(
            lambda _: self._loop.call_soon_threadsafe(task.cancel)  # no effect where it answered
        )

    async def _placement(self, turn: TurnFacts, claim: Future[Placement | None]) -> None:
        """Answer where the turn goes; None where that is not for us to say."""
        placement: Placement | None = None
        failure: Exception | None = None
        try:
            await self._looked()
            placement = await self._placed(turn) if self.on else None
        except asyncio.CancelledError:
            if not self._stopping:
                claim.cancel()
                raise
            failure = RuntimeError("the generation was shut down")
        except Exception as error:
            failure = error
        if not claim.set_running_or_notify_cancel():
            if placement is not None:
                self._dispatcher.finish(placement.ticket, None)
        elif failure is not None:
            claim.set_exception(failure)
        else:
            claim.set_result(placement)

    async def _placed(self, turn: TurnFacts) -> Placement | None:
        metadata = replace(turn.metadata, epoch=self._epoch)
        turn = replace(turn, metadata=metadata, avoid=self._suspected())
        waiting = self._loop.create_task(self._dispatcher.place(turn))
        is_taken = False
        try:
            while not waiting.done():
                if not any(facts.healthy for facts in self._facts()):
                    return None  # NeMo-RL has an error of its own for that
                await asyncio.wait({waiting}, timeout=_GLANCE_S)
            placement = waiting.result()
            is_taken = True
        finally:
            if not is_taken:
                waiting.add_done_callback(self._drop)
                waiting.cancel()
        self._exchange.placed(turn.metadata, placement.replica)
        return placement

    def _suspected(self) -> frozenset[int]:
        """Replicas that lately failed a turn, as long as there are others."""
        now = time.monotonic()
        suspects = frozenset(replica for replica, until in self._suspects.items() if now < until)
        others = (facts for facts in self._facts() if facts.healthy and facts.replica not in suspects)
        return suspects if any(others) else frozenset()

    def _drop(self, waiting: asyncio.Task[Placement]) -> None:
        if not waiting.cancelled() and waiting.exception() is None:
            self._dispatcher.finish(waiting.result().ticket, None)

    def _arrive(self) -> None:
        """A turn comes, or a batch of them. The first one after a pause looks what happened meanwhile."""
        self._running += 1
        if self._pause is not None:
            self._pause.cancel()
        if self._running == 1:
            self._looking = self._keep(self._look())

    async def _looked(self) -> None:
        if self._looking is not None:
            await asyncio.shield(self._looking)

    def _leave(self, turn: Turn, placement: Placement | None) -> None:
        """A turn is over."""
        if placement is not None:
            outcome = None if turn.answer is None else Outcome(turn.generated, turn.cached_tokens)
            self._dispatcher.finish(placement.ticket, outcome)
        self._leave_together([turn])

    def _leave_together(self, turns: Iterable[Turn]) -> None:
        for turn in turns:
            if turn.answer is not None and turn.replica is not None:
                self._exchange.finished(turn.metadata, turn.replica, len(turn.answer))
        self._running -= 1
        if not self._running:
            self._pause = self._loop.call_later(_PAUSE_S, lambda: self._keep(self._share_all()))

    async def _look(self) -> None:
        """Find out the replicas' policy epochs; those that do not say so in time tell with their answers."""
        numbers = [facts.replica for facts in self._facts() if facts.healthy]
        try:
            async with asyncio.timeout(_LOOK_S):
                epochs = await asyncio.gather(*(self._replicas.ask(each, "epoch") for each in numbers))
        except Exception as error:
            _log.debug("the replicas' policy epochs are not known yet: %r", error)
            return
        self._began(max(epochs, default=0))

    def _began(self, epoch: int) -> None:
        """There is a new policy epoch. Placement takes all KV of earlier ones for gone at its first turn."""
        if epoch > self._epoch:
            self._epoch = epoch
            self._keep(self._share_all())

    def _take_in(self, turns: Sequence[tuple[TurnMetadata, int, int]]) -> None:
        for turn, replica, tokens in turns:
            self._exchange.finished(turn, replica, tokens)
        self._keep(self._share_all())

    async def _share_all(self) -> None:
        """What each replica learned goes to the others."""
        if self._war.speculative.enabled:
            await self._exchange.end_step()

    async def _exchange_live(self, exchange: HistoryExchange) -> None:
        """Exchange what finishes, if that is configured, until the end."""
        async with exchange.step(lambda when, done: None):
            await asyncio.Event().wait()
