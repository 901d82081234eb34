"""What distinguishes one scheduler from another; the defaults are those of the simplest."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from nemo_war.routing.facts import Books, Outcome, ReplicaFacts, Waiting
from nemo_war.snapshot import State


class Policy(ABC):
    """What to do with a turn, given the books. It has no queue of its own.

    By default: first come, first served, nothing is held and nothing learned.
    """

    def __init__(self, seed: int = 0) -> None:
        """Break ties as the seed says."""
        self._random = random.Random(seed)

    @abstractmethod
    def choose(
        self, turn: Waiting, candidates: Sequence[ReplicaFacts], books: Books, now: float
    ) -> int | None:
        """A replica among the candidates (all healthy, at least one), or None to hold the turn."""

    def order(self, waiting: Sequence[Waiting], now: float) -> Sequence[Waiting]:
        """The order in which waiting turns are considered."""
        return waiting

    def describe(self, turn: Waiting) -> tuple[bool, int]:
        """(critical, expected remaining output tokens) of a turn about to be placed."""
        return False, 0

    def begin_step(self, trajectories: int) -> None:  # noqa: B027
        """A new step of this many trajectories starts; earlier ones are over."""

    def advance_epoch(self, epoch: int) -> None:  # noqa: B027
        """The policy model was updated: no replica holds KV of use any more."""

    def placed(self, turn: Waiting, replica: int, now: float) -> None:  # noqa: B027
        """The turn was given to the replica."""

    def finished(self, turn: Waiting, replica: int, outcome: Outcome | None, now: float) -> None:  # noqa: B027
        """The placed turn is over; without outcome it failed or was cancelled."""

    def withdrawn(self, ticket: int) -> None:  # noqa: B027
        """A waiting turn was taken out of the queue."""

    def ended(self, trajectory: str) -> None:  # noqa: B027
        """There will be no further turn of it."""

    def lost(self, replica: int) -> None:  # noqa: B027
        """The replica died or was restarted: what it held is gone."""

    def state(self) -> State | None:
        """What was learned that holds for trajectories to come; None from one that learns nothing."""
        return None

    def restore(self, state: State) -> None:  # noqa: B027
        """Go on with what a state of the same policy learned.

        Raises:
            ValueError: it is none.
        """

    def _least(self, candidates: Sequence[int], load: Callable[[int], float | tuple[float, ...]]) -> int:
        """One of the least loaded. Ties go at random: a fixed order would send every quiet moment to one."""
        loads = [load(replica) for replica in candidates]
        lightest = min(loads)
        return self._random.choice([r for r, each in zip(candidates, loads, strict=True) if each == lightest])


def in_flight(books: Books, replica: int) -> int:
    """Turns placed on the replica and not finished."""
    return len(books[replica].in_flight) if replica in books else 0


def trajectories(books: Books, replica: int) -> int:
    """Live trajectories whose last turn the replica had."""
    return len(books[replica].trajectories) if replica in books else 0
