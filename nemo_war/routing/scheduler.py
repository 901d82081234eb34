"""Placement of turns: the queue in front of the replicas, and the books of what went where.

A scheduler is pure: it gets facts and the time, keeps its own books, and returns
decisions. It never talks to a replica and never reads a clock. The rollout loop, the
HTTP router and the simulator drive the same object:

    ticket = scheduler.submit(turn, now)          # the turn waits from here on
    for placement in scheduler.decide(replicas, now): ...   # tickets that go now, in order
    scheduler.finish(placement.ticket, outcome, now)        # once per placement, however it ended

`decide` is asked again whenever something changed: a turn arrived or ended, a replica
came or went. What it does not return is held: it waits for room. The load is reserved
at decision time, so that a burst does not see one stale picture and land on one replica.

What distinguishes one scheduler from another is its `Policy`; the queue, the books and
the invariants are the same for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from nemo_war.routing.facts import Books, Outcome, Placement, ReplicaBooks, ReplicaFacts, TurnFacts, Waiting
from nemo_war.routing.policy import Policy, in_flight

_LOOK_AHEAD = 16
"""Turns held in a row after which the rest of the queue is not asked: where so many find no room the next
hardly does, and a decision must not cost more the longer the queue is."""


class NoReplicaError(Exception):
    """No healthy replica is left to place a turn on."""


class Scheduler:
    """A queue of turns in front of replicas, emptied as its policy decides."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.books: Books = {}
        self._waiting: dict[int, Waiting] = {}
        self._running: dict[int, tuple[int, Waiting]] = {}
        self._home: dict[str, int] = {}
        self._tickets = itertools.count()
        self._epoch = 0

    @property
    def waiting(self) -> int:
        """Turns held back."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Turns placed and not finished."""
        return len(self._running)

    def is_running(self, ticket: int) -> bool:
        """Whether the turn is placed and not finished."""
        return ticket in self._running

    def running_on(self, replica: int) -> int:
        """Turns placed on this replica and not finished."""
        return in_flight(self.books, replica)

    def begin_step(self, trajectories: int) -> None:
        """A new step of this many trajectories starts; earlier ones are over."""
        for trajectory in list(self._home):
            self.end(trajectory)
        self.policy.begin_step(trajectories)

    def submit(self, turn: TurnFacts, now: float) -> int:
        """Queue a turn. The first one of a new policy epoch says that the KV of earlier ones is void.

        Returns:
            Its ticket.
        """
        if turn.metadata.epoch > self._epoch:
            self._epoch = turn.metadata.epoch
            self.policy.advance_epoch(self._epoch)
        ticket = next(self._tickets)
        self._waiting[ticket] = Waiting(ticket, turn, now)
        return ticket

    def decide(self, replicas: Iterable[ReplicaFacts], now: float) -> list[Placement]:
        """Place as many waiting turns as the policy lets go, and count them as running.

        Raises:
            NoReplicaError: turns wait, and no replica is healthy. They stay queued.
        """
        if not self._waiting:
            return []
        healthy = [facts for facts in replicas if facts.healthy]
        if not healthy:
            raise NoReplicaError(f"no replica is healthy, and {len(self._waiting)} turns wait for one")
        placements, held = [], 0
        for waiting in self.policy.order(list(self._waiting.values()), now):
            candidates = healthy
            if waiting.turn.avoid:
                candidates = [facts for facts in healthy if facts.replica not in waiting.turn.avoid]
            replica = self.policy.choose(waiting, candidates, self.books, now) if candidates else None
            if replica is not None:
                placements.append(self._place(waiting, replica, now))
                held = 0
            else:
                held += 1
                if held == _LOOK_AHEAD:
                    break
        return placements

    def finish(self, ticket: int, outcome: Outcome | None, now: float) -> None:
        """The turn ended; with no outcome it failed or was cancelled. Once per placement.

        Raises:
            ValueError: the ticket is not running.
        """
        if ticket not in self._running:
            raise ValueError(f"ticket {ticket} is not running, so that it cannot finish")
        replica, placed = self._running.pop(ticket)
        del self.books[replica].in_flight[ticket]
        self.policy.finished(placed, replica, outcome, now)

    def cancel(self, ticket: int) -> bool:
        """Take a waiting turn out of the queue; false when it is not (or no longer) waiting."""
        if self._waiting.pop(ticket, None) is None:
            return False
        self.policy.withdrawn(ticket)
        return True

    def end(self, trajectory: str) -> None:
        """There will be no further turn of this trajectory; what is held for it is released."""
        home = self._home.pop(trajectory, None)
        if home is not None:
            self.books[home].trajectories.discard(trajectory)
        self.policy.ended(trajectory)

    def lost(self, replica: int) -> None:
        """The replica died or was restarted: what it held is gone. Its turns are still to be finished."""
        for trajectory in [name for name, home in self._home.items() if home == replica]:
            del self._home[trajectory]
        if replica in self.books:
            self.books[replica].trajectories.clear()
        self.policy.lost(replica)

    def check_integrity(self) -> bool:
        """Whether the books agree with each other; for tests."""
        placed = {ticket: number for number, books in self.books.items() for ticket in books.in_flight}
        homes = {name: number for number, books in self.books.items() for name in books.trajectories}
        return (
            placed == {ticket: replica for ticket, (replica, _) in self._running.items()}
            and homes == self._home
            and not self._waiting.keys() & self._running.keys()
        )

    def _place(self, waiting: Waiting, replica: int, now: float) -> Placement:
        turn, trajectory = waiting.turn, waiting.turn.metadata.trajectory
        del self._waiting[waiting.ticket]
        self._running[waiting.ticket] = (replica, waiting)
        books = self.books.setdefault(replica, ReplicaBooks())
        books.in_flight[waiting.ticket] = turn
        home = self._home.get(trajectory)
        if home is not None and home != replica:
            self.books[home].trajectories.discard(trajectory)
        self._home[trajectory] = replica
        books.trajectories.add(trajectory)
        critical, remaining = self.policy.describe(waiting)
        self.policy.placed(waiting, replica, now)
        return Placement(waiting.ticket, replica, trajectory, critical, remaining)
