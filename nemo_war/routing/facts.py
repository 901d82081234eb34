"""What placement is decided on and what it answers: plain records, shared by all who place turns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from nemo_war.generation.step_time import StepTimeModel
from nemo_war.metadata import TurnMetadata


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """What is known of a turn when it must be placed.

    Attributes:
        metadata: who asks.
        prompt_tokens: length of the whole prompt.
        max_new_tokens: most tokens this turn may generate.
        prompt: int32[n], its tokens, or as many from the start as are known; None where none are.
        variant: what else its KV depends on: an adapter, the images in it.
        estimated: `prompt` stands for tokens that are not known, as text does; what an engine counts does
            not compare with it.
        avoid: replicas that it failed on.
    """

    metadata: TurnMetadata
    prompt_tokens: int
    max_new_tokens: int
    prompt: np.ndarray | None = None
    variant: str = ""
    estimated: bool = False
    avoid: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What is known of a replica at decision time.

    Attributes:
        replica: its number.
        healthy: whether it may be given work; false when it is dead, updating or draining.
        kv_tokens: capacity of its KV cache; 0 where unknown, which bounds nothing.
        step_time: its own step times, as replicas may differ; None where unknown.
        speculates: whether it drafts from the trajectories it has seen.
    """

    replica: int
    healthy: bool = True
    kv_tokens: int = 0
    step_time: StepTimeModel | None = None
    speculates: bool = False


class Placement(NamedTuple):
    """A decision: this turn goes to this replica.

    Attributes:
        ticket: number that `submit` gave the turn.
        replica: where to.
        trajectory: whose turn it is.
        critical: the trajectory is expected to end the step; its drafts may cost more.
        remaining: output tokens that the trajectory is expected to need still; 0 where unknown.
    """

    ticket: int
    replica: int
    trajectory: str
    critical: bool = False
    remaining: int = 0

    def told(self, turn: TurnMetadata) -> TurnMetadata:
        """The turn's metadata with what was found out at its placement, for the replica."""
        return replace(turn, critical=self.critical, remaining=self.remaining)


class Outcome(NamedTuple):
    """What became of a turn that a replica answered.

    Attributes:
        output_tokens: tokens generated.
        cached_tokens: prompt tokens whose KV was there; None where the engine does not say.
    """

    output_tokens: int
    cached_tokens: int | None = None


class Waiting(NamedTuple):
    """A turn in the queue."""

    ticket: int
    turn: TurnFacts
    since: float


@dataclass(slots=True)
class ReplicaBooks:
    """What a scheduler knows of a replica from its own decisions.

    Attributes:
        in_flight: turns placed on it and not finished, by ticket.
        trajectories: trajectories whose last turn was placed on it, and which are not over.
    """

    in_flight: dict[int, TurnFacts] = field(default_factory=dict)
    trajectories: set[str] = field(default_factory=set)


Books = dict[int, ReplicaBooks]
