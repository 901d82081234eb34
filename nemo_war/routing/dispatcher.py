"""The shell around a scheduler that coroutines can wait in.

A scheduler is asked, it never calls back; this asks it again whenever something changed,
and wakes the turns that may go. A turn that is cancelled, waiting or placed, leaves
nothing behind.

What places turns for a fleet is a `Placer`: a `Dispatcher` where all of them come from
one process, or the way to one that many processes share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from nemo_war.routing.facts import Outcome, Placement, ReplicaFacts, TurnFacts
from nemo_war.routing.scheduler import Scheduler
from nemo_war.snapshot import State

_TICK_S = 1.0
"""Patience runs out with time alone, so that a queue is looked at this often even when nothing happens."""
_QUICK_S = 0.001
"""A decision that takes longer is followed by a pause as long as it took. With thousands in the queue nothing
else would get done: those who come would not be heard, nor those who ask whether anybody is there."""
_LONGEST_PAUSE_S = 0.05
"""The first decision compiles, which says nothing of the next."""


class Placer(Protocol):
    """Lets turns wait for their placement; see `Dispatcher` for what each method does."""

    async def place(self, turn: TurnFacts) -> Placement: ...  # noqa: D102

    def finish(self, ticket: int, outcome: Outcome | None) -> None: ...  # noqa: D102

    def begin_step(self, trajectories: int) -> None: ...  # noqa: D102

    def end(self, trajectory: str) -> None: ...  # noqa: D102

    def lost(self, replica: int) -> None: ...  # noqa: D102

    def running_on(self, replica: int) -> int: ...  # noqa: D102

    def pump(self) -> None: ...  # noqa: D102

    def fail(self, error: Exception) -> None: ...  # noqa: D102

    async def state(self) -> State | None: ...  # noqa: D102

    async def stop(self) -> None: ...  # noqa: D102


class Dispatcher:
    """Lets turns wait for their placement. All calls come from one event loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        replicas: Callable[[], Sequence[ReplicaFacts] | None],
        clock: Callable[[], float],
    ) -> None:
        """Wrap a scheduler.

        Args:
            scheduler: asked by this dispatcher only.
            replicas: the replicas as they are now; None while nothing may be placed.
            clock: seconds.
        """
        self.scheduler = scheduler
        self._replicas = replicas
        self._clock = clock
        self._waiting: dict[int, asyncio.Future[Placement]] = {}
        self._tick: asyncio.Handle | None = None
        self._tick_at = 0.0
        self._pause_until = 0.0

    async def place(self, turn: TurnFacts) -> Placement:
        """Wait until the turn may go somewhere; then `finish` it, whatever becomes of it.

        Raises:
            Exception: what `fail` was given meanwhile, or what the policy raised.
        """
        ticket, placed = self.submit(turn)
        try:
            return await placed
        except BaseException:
            self.withdraw(ticket)
            raise

    def submit(self, turn: TurnFacts) -> tuple[int, asyncio.Future[Placement]]:
        """As `place`, for who waits in a way of his own.

        Returns:
            The ticket, and its placement to come. `withdraw` it if there is none in the end.
        """
        ticket = self.scheduler.submit(turn, self._clock())
        placed = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            self.pump()
        except BaseException:
            self.withdraw(ticket)
            raise
        return ticket, placed

    def withdraw(self, ticket: int) -> None:
        """Nobody waits for this turn any more."""
        self._waiting.pop(ticket, None)
        if not self.scheduler.cancel(ticket):
            self.finish(ticket, None)

    def finish(self, ticket: int, outcome: Outcome | None) -> None:
        """The placed turn is over; without outcome it failed or was cancelled."""
        self.scheduler.finish(ticket, outcome, self._clock())
        self.pump()

    def begin_step(self, trajectories: int) -> None:
        """A new step of this many trajectories starts; earlier ones are over."""
        self.scheduler.begin_step(trajectories)

    def end(self, trajectory: str) -> None:
        """There will be no further turn of this trajectory."""
        self.scheduler.end(trajectory)
        self.pump()

    def lost(self, replica: int) -> None:
        """What the replica held is gone."""
        self.scheduler.lost(replica)
        self.pump()

    def running_on(self, replica: int) -> int:
        """Turns placed on this replica and not finished, counted from the decision on."""
        return self.scheduler.running_on(replica)

    def pump(self) -> None:
        """Let go whatever may go now. With no replica left all wait; how long is for them to say."""
        replicas = self._replicas() if self._waiting else None
        pause_s = self._pause_until - self._clock()
        if replicas and any(facts.healthy for facts in replicas) and pause_s <= 0:
            self._decide(replicas)
        if self._waiting:
            self._look_again(pause_s if pause_s > 0 else _TICK_S)

    def fail(self, error: Exception) -> None:
        """Nothing will be placed any more; whoever waits is told."""
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            if not each.done():
                each.set_exception(error)

    async def state(self) -> State | None:
        """What the policy learned, for a checkpoint; None where there is nothing, or it cannot be had."""
        return self.scheduler.policy.state()

    async def stop(self) -> None:
        """Look at the queue no more."""
        if self._tick is not None:
            self._tick.cancel()

    def _decide(self, replicas: Sequence[ReplicaFacts]) -> None:
        began = self._clock()
        try:
            placements = self.scheduler.decide(replicas, began)
        except Exception as error:  # the policy's; which of the turns it stumbled over cannot be told
            self.fail(error)
            return
        for placement in placements:
            waiting = self._waiting.pop(placement.ticket, None)
            if waiting is not None and not waiting.done():  # else its coroutine is about to withdraw it
                waiting.set_result(placement)
        ended = self._clock()
        if ended - began > _QUICK_S:
            self._pause_until = ended + min(ended - began, _LONGEST_PAUSE_S)

    def _look_again(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time() + delay_s
        if self._tick is not None and self._tick_at > at:
            self._tick.cancel()
            self._tick = None
        if self._tick is None:
            self._tick, self._tick_at = loop.call_later(delay_s, self._on_tick), at

    def _on_tick(self) -> None:
        self._tick = None
        self.pump()
