"""The shell around a scheduler that coroutines can wait in.

A scheduler is asked, it never calls back; this asks it again whenever something changed,
and wakes the turns that may go. A turn that is cancelled, waiting or placed, leaves
nothing behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from nemo_war.routing.facts import Outcome, Placement, ReplicaFacts, TurnFacts
from nemo_war.routing.scheduler import Scheduler

_TICK_S = 1.0
"""Patience runs out with time alone, so that a queue is looked at this often even when nothing happens."""


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
        self._tick: asyncio.TimerHandle | None = None

    async def place(self, turn: TurnFacts) -> Placement:
        """Wait until the turn may go somewhere; then `finish` it, whatever becomes of it.

        Raises:
            Exception: what `fail` was given meanwhile.
        """
        ticket = self.scheduler.submit(turn, self._clock())
        waiting = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            self.pump()
            return await waiting
        except BaseException:
            if not self.scheduler.cancel(ticket):
                self.finish(ticket, None)
            raise
        finally:
            self._waiting.pop(ticket, None)

    def finish(self, ticket: int, outcome: Outcome | None) -> None:
        """The placed turn is over; without outcome it failed or was cancelled."""
        self.scheduler.finish(ticket, outcome, self._clock())
        self.pump()

    def end(self, trajectory: str) -> None:
        """There will be no further turn of this trajectory."""
        self.scheduler.end(trajectory)
        self.pump()

    def lost(self, replica: int) -> None:
        """What the replica held is gone."""
        self.scheduler.lost(replica)
        self.pump()

    def pump(self) -> None:
        """Let go whatever may go now. With no replica left all wait; how long is for them to say."""
        replicas = self._replicas() if self._waiting else None
        if replicas and any(facts.healthy for facts in replicas):
            for placement in self.scheduler.decide(replicas, self._clock()):
                waiting = self._waiting.pop(placement.ticket)
                if not waiting.cancelled():  # else its coroutine is about to come, and finishes it
                    waiting.set_result(placement)
        if self._waiting and self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(_TICK_S, self._on_tick)

    def fail(self, error: Exception) -> None:
        """Nothing will be placed any more; whoever waits is told."""
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            if not each.done():
                each.set_exception(error)

    def _on_tick(self) -> None:
        self._tick = None
        self.pump()
