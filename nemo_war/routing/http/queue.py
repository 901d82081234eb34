"""Turns that wait for a replica: within bounds, and never for the one that just failed them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from nemo_war.metadata import TurnMetadata
from nemo_war.routing.dispatcher import Dispatcher
from nemo_war.routing.facts import Placement, TurnFacts
from nemo_war.routing.http.answer import Answer
from nemo_war.routing.http.profiles import RefusalError, no_replica, overloaded
from nemo_war.routing.http.replicas import Replica, Replicas
from nemo_war.routing.http.settings import RouterSettings
from nemo_war.routing.policy import Policy
from nemo_war.routing.scheduler import Scheduler

NOWHERE: frozenset[int] = frozenset()


@dataclass(slots=True)
class Reservation:
    """A request's place at a replica, and the answer it gets there.

    Attributes:
        turn: whose turn the request is; None where it is none.
    """

    replica: Replica
    answer: Answer = field(default_factory=Answer)
    turn: TurnMetadata | None = None


class Queue:
    """What waits, and what was placed."""

    def __init__(
        self, policy: Policy, replicas: Replicas, settings: RouterSettings, clock: Callable[[], float]
    ) -> None:
        self.scheduler = Scheduler(policy)
        self._dispatcher = Dispatcher(self.scheduler, replicas.facts, clock)
        self._replicas, self._settings, self._clock = replicas, settings, clock
        self._bounds: dict[asyncio.Timeout, frozenset[int]] = {}
        self._outage_since: float | None = None

    @asynccontextmanager
    async def placed(
        self, turn: TurnFacts, on_answer: Callable[[Answer], None], avoid: frozenset[int]
    ) -> AsyncIterator[Reservation]:
        """Wait for a place, and free it at the end.

        Args:
            turn: what to place.
            on_answer: told of its answer once that is complete.
            avoid: replicas it failed on.

        Raises:
            RefusalError: there is none, in time or at all.
        """
        # Who has waited before is not turned away.
        if not avoid and self.scheduler.waiting >= self._settings.max_waiting:
            raise overloaded(f"{self.scheduler.waiting} requests wait already")
        placement = await self._wait(replace(turn, avoid=avoid), avoid)
        replica, told = self._replicas.all[placement.replica], placement.told(turn.metadata)
        reservation = Reservation(replica, Answer(on_answer), told)
        try:
            yield reservation
        finally:
            self._dispatcher.finish(placement.ticket, reservation.answer.outcome())

    def end(self, trajectory: str) -> None:
        """There will be no further turn of this trajectory."""
        self._dispatcher.end(trajectory)

    def lost(self, replica: int) -> None:
        """The replica is gone, with what it held."""
        self._dispatcher.lost(replica)
        self.give_up()

    def returned(self) -> None:
        """A replica is there again."""
        self._dispatcher.pump()

    def give_up(self) -> None:
        """Refuse those whom nobody will serve: after a long outage, or when they failed on all left."""
        if self._replicas.healthy():
            self._outage_since = None
        elif self._outage_since is None:
            self._outage_since = self._clock()
        for bound, avoid in list(self._bounds.items()):
            if self._hopeless(avoid):
                del self._bounds[bound]
                bound.reschedule(asyncio.get_running_loop().time())

    async def _wait(self, turn: TurnFacts, avoid: frozenset[int]) -> Placement:
        if self._hopeless(avoid):
            raise self._refusal(avoid)
        bound = asyncio.timeout(self._settings.wait_timeout_s)
        try:
            async with bound:
                self._bounds[bound] = avoid
                return await self._dispatcher.place(turn)
        except TimeoutError:
            raise self._refusal(avoid) from None
        finally:
            self._bounds.pop(bound, None)

    def _hopeless(self, avoid: frozenset[int]) -> bool:
        healthy = self._replicas.healthy()
        if healthy or avoid:
            return healthy <= avoid
        since = self._outage_since
        return since is not None and self._clock() - since >= self._settings.outage_timeout_s

    def _refusal(self, avoid: frozenset[int]) -> RefusalError:
        healthy = self._replicas.healthy()
        if not healthy:
            return no_replica("no replica is healthy")
        if healthy <= avoid:
            return no_replica("no other replica is healthy, and this request failed on those that are")
        return overloaded(f"no replica had room within {self._settings.wait_timeout_s:g} s")
