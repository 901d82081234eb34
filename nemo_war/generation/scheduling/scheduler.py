"""One scheduler for all who place turns: the body of an actor that several processes ask.

Each process is a client with a name. Its turns have numbers, and so has what it tells: a turn
is over, a trajectory ended, how it sees the replicas. That is acted on once and in order,
however often and in whatever order it arrives. A turn that is asked for twice has one
placement, and one that is over when its `place` arrives has none.

A scheduler that is started again knows nothing, and one that did not hear of a client for long
forgets it. What it knows of a client is of one *life*, which `ping` names; calls that are meant
for another one are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

from nemo_war.metadata import TurnMetadata
from nemo_war.routing.dispatcher import Dispatcher
from nemo_war.routing.facts import Outcome, Placement, ReplicaFacts, TurnFacts
from nemo_war.routing.policy import Policy
from nemo_war.routing.scheduler import Scheduler
from nemo_war.snapshot import State

_SILENCE_S = 60.0
"""A client that was not heard of for so long is gone, with its turns: one that has any asks every second."""


class OtherLifeError(Exception):
    """The call was meant for another life: what stood in its books is gone."""


class Pulse(NamedTuple):
    """The answer of a scheduler that is there.

    Attributes:
        life: of what it knows of this client.
        next: number of what it has to be told next; everything before was acted on.
        waiting: numbers of this client's turns that wait.
    """

    life: str
    next: int
    waiting: frozenset[int]


class _Held(NamedTuple):
    """A turn that waits or was placed."""

    ticket: int
    placed: asyncio.Future[Placement]


@dataclass(slots=True)
class _Client:
    """One process that places turns.

    Attributes:
        seen: when it was heard of last.
        life: of this record.
        turns: those that wait and those that were placed, by number.
        oldest: its turns below this number are over.
        over: numbers from there on that are over.
        next: number of what is to be acted on next.
        early: what arrived before its turn, by number.
        replicas: as it sees them; None while it wants nothing placed.
        sees: whether it said.
    """

    seen: float
    life: str = field(default_factory=lambda: uuid4().hex)
    turns: dict[int, _Held] = field(default_factory=dict)
    oldest: int = 0
    over: set[int] = field(default_factory=set)
    next: int = 0
    early: dict[int, Callable[[], None]] = field(default_factory=dict)
    replicas: Sequence[ReplicaFacts] | None = None
    sees: bool = False


class SharedScheduler:
    """A scheduler and its queue, for many clients."""

    def __init__(self, policy: Policy, clock: Callable[[], float] = time.monotonic) -> None:
        """Know no client yet, and no replica.

        Args:
            policy: where turns go.
            clock: seconds.
        """
        _rehearse(policy)
        # A copy, as Ray hands over arrays that cannot be written to.
        self.scheduler = Scheduler(copy.deepcopy(policy))
        self._clock = clock
        self._dispatcher = Dispatcher(self.scheduler, lambda: self._replicas, clock)
        self._clients: dict[str, _Client] = {}
        self._replicas: list[ReplicaFacts] | None = None

    async def ping(self, client: str, oldest: int) -> Pulse:
        """Say that it is there.

        Args:
            client: who asks.
            oldest: its turns below this number are over.
        """
        of = self._clients.setdefault(client, _Client(self._clock()))
        of.seen = self._clock()
        of.oldest = max(of.oldest, oldest)
        of.over = {number for number in of.over if number >= of.oldest}
        self._forget_the_silent()
        waiting = (number for number, held in of.turns.items() if not held.placed.done())
        return Pulse(of.life, of.next, frozenset(waiting))

    async def state(self) -> State | None:
        """What the policy learned, for a checkpoint."""
        return self.scheduler.policy.state()

    async def place(self, life: str, client: str, number: int, turn: TurnFacts) -> Placement | None:
        """Wait until the turn may go somewhere; then `finish` it, whatever becomes of it, this call included.

        Returns:
            The placement; None for a turn that is over.

        Raises:
            OtherLifeError: it was for another life.
            Exception: what the policy raised.
        """
        of = self._expect(life, client)
        if number < of.oldest or number in of.over:
            return None
        if number not in of.turns:
            of.turns[number] = _Held(*self._dispatcher.submit(turn))
        held = of.turns[number]
        try:
            return await asyncio.shield(held.placed)
        except asyncio.CancelledError:
            if (
                held.placed.cancelled()
            ):  # not an error, as many may be withdrawn at once and errors cost Ray a lot
                return None
            raise
        except Exception:
            self._release(of, number, None)
            raise

    async def finish(self, life: str, client: str, word: int, number: int, outcome: Outcome | None) -> None:
        """The turn is over, whether it was placed, waits, or is still on its way here.

        Args:
            life: that this is meant for.
            client: who says so.
            word: number of what is told here; so for all that follow.
            number: of the turn.
            outcome: as for `Scheduler.finish`.

        Raises:
            OtherLifeError: it was for another life.
        """
        of = self._expect(life, client)
        self._act(of, word, partial(self._release, of, number, outcome))

    async def end(self, life: str, client: str, word: int, trajectory: str) -> None:
        """There will be no further turn of this trajectory."""
        self._act(self._expect(life, client), word, partial(self._dispatcher.end, trajectory))

    async def begin_step(self, life: str, client: str, word: int, trajectories: int) -> None:
        """A new step of this many trajectories starts; earlier ones are over, those of all clients."""
        self._act(self._expect(life, client), word, partial(self._dispatcher.begin_step, trajectories))

    async def lost(self, life: str, client: str, word: int, replica: int) -> None:
        """What the replica held is gone."""
        self._act(self._expect(life, client), word, partial(self._dispatcher.lost, replica))

    async def set_replicas(
        self, life: str, client: str, word: int, replicas: Sequence[ReplicaFacts] | None
    ) -> None:
        """Take over how a client sees the replicas; None while nothing may be placed.

        A replica that any client knows to be down gets nothing, and while one wants nothing placed, nothing
        is. Otherwise the newest word counts.
        """
        self._act(self._expect(life, client), word, partial(self._see, client, replicas))

    async def statistics(self) -> dict[str, Any]:
        """In which process it is, how many wait and run, and where."""
        return {
            "process": os.getpid(),
            "clients": len(self._clients),
            "waiting": self.scheduler.waiting,
            "running": self.scheduler.running,
            "replicas": {number: self.scheduler.running_on(number) for number in self.scheduler.books},
        }

    def check_integrity(self) -> bool:
        """Whether what clients hold is what the books say; for tests."""
        held = [each.placed for of in self._clients.values() for each in of.turns.values()]
        placed = sum(each.done() for each in held)
        counts = (self.scheduler.running, self.scheduler.waiting)
        return self.scheduler.check_integrity() and counts == (placed, len(held) - placed)

    def _expect(self, life: str, client: str) -> _Client:
        of = self._clients.get(client)
        if of is None or of.life != life:
            raise OtherLifeError(f"life {life} of {client} is over")
        of.seen = self._clock()
        return of

    def _act(self, of: _Client, word: int, act: Callable[[], None]) -> None:
        """Do this when all before it is done; nothing where it was done already."""
        if word >= of.next:
            of.early[word] = act
        while (act_now := of.early.pop(of.next, None)) is not None:
            of.next += 1
            with contextlib.suppress(Exception):  # a policy's; the books are right, and others must be heard
                act_now()

    def _release(self, of: _Client, number: int, outcome: Outcome | None) -> None:
        held = of.turns.pop(number, None)
        of.over.add(number)  # its `place` may still come, for the first time or once more
        if held is None:
            return
        if held.placed.done() and held.placed.exception() is None:
            self._dispatcher.finish(held.ticket, outcome)
        else:
            held.placed.cancel()
            self._dispatcher.withdraw(held.ticket)

    def _see(self, client: str, replicas: Sequence[ReplicaFacts] | None) -> None:
        of = self._clients[client] = self._clients.pop(client)  # the last one is the newest
        of.replicas, of.sees = replicas, True
        self._put_together()

    def _put_together(self) -> None:
        """Make one view of all; kept until the next word, as policies know a record by its identity."""
        views = [of.replicas for of in self._clients.values() if of.sees]
        known = [view for view in views if view is not None]
        down = {facts.replica for view in known for facts in view if not facts.healthy}
        self._replicas = None
        if known and len(known) == len(views):
            self._replicas = [
                replace(facts, healthy=False) if facts.replica in down else facts for facts in known[-1]
            ]
        self._dispatcher.pump()

    def _forget_the_silent(self) -> None:
        """A process that died says nothing; what it held must not be held for ever."""
        now = self._clock()
        silent = [name for name, of in self._clients.items() if now - of.seen > _SILENCE_S]
        for name in silent:
            of = self._clients.pop(name)
            for number in list(of.turns):
                with contextlib.suppress(Exception):
                    self._release(of, number, None)
        if silent:
            self._put_together()


def _rehearse(policy: Policy) -> None:
    """Place a turn with a copy of the policy: what it compiles must not keep those waiting who come first."""
    with contextlib.suppress(Exception):  # it will come up again
        scheduler = Scheduler(copy.deepcopy(policy))
        scheduler.submit(TurnFacts(TurnMetadata("", ""), 1, 1), 0.0)
        scheduler.decide([ReplicaFacts(0)], 0.0)
