"""Placement of turns: the interface every policy implements.

A scheduler is pure: it gets facts, keeps its own books, and returns decisions. It
never talks to a replica. The rollout loop (and later the HTTP router and the
simulator) drives it: `choose` for every turn, `finish` when that turn is over,
whatever its outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nemo_war.metadata import TurnMetadata


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """What is known of a turn when it must be placed.

    Attributes:
        metadata: who asks.
        prompt_tokens: length of the whole prompt.
        max_new_tokens: most tokens this turn may generate.
    """

    metadata: TurnMetadata
    prompt_tokens: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What is known of a replica at decision time."""

    replica: int
    healthy: bool = True


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision: this turn goes to this replica."""

    replica: int
    trajectory: str


class NoReplicaError(Exception):
    """No healthy replica is left to place a turn on."""


class Scheduler(Protocol):
    """Chooses a replica for each turn."""

    def begin_step(self, trajectories: int) -> None:
        """A new step of this many trajectories starts; earlier ones are over."""
        ...

    def choose(self, turn: TurnFacts, replicas: Sequence[ReplicaFacts]) -> Placement:
        """Place a turn, and count it as in flight on the chosen replica from now on.

        The load is reserved at decision time, so that a burst of decisions does not
        see one stale picture and land on one replica.

        Raises:
            NoReplicaError: no replica is healthy.
        """
        ...

    def finish(self, placement: Placement) -> None:
        """The turn ended, failed or was cancelled; call exactly once per placement."""
        ...


def healthy(replicas: Sequence[ReplicaFacts]) -> list[int]:
    """Numbers of the replicas that may serve.

    Raises:
        NoReplicaError: there are none.
    """
    serving = [facts.replica for facts in replicas if facts.healthy]
    if not serving:
        raise NoReplicaError(f"none of the {len(replicas)} replicas is healthy")
    return serving
