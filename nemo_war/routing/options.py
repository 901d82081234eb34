"""What WAR's placement can be told to do otherwise, for ablations.

Apart from the placement itself, so that a command line can list it where nothing can be compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class Weights(NamedTuple):
    """Ablations: a term with weight 0 is left out."""

    prefill: float = 1.0
    queue: float = 1.0
    pace: float = 1.0
    others: float = 1.0
    siblings: float = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the policy does; everything but the defaults is for ablations.

    Attributes:
        order: of waiting newcomers, by the remaining output that was expected when they came. Shortest first
            makes room soonest; longest first would begin early with what the step ends with (Graham's
            list scheduling), but what is predicted within a step is too vague for that. Simulated makespans,
            shortest, longest and in order of arrival, five seeds: 229, 241, 235 s for tau-bench with room for
            a third and 306, 322, 327 s for a sixth; 981, 1053, 984 s and 1397, 1412, 1338 s for coding
            sessions with room for six and for three on a replica.
        admission: whether to hold what does not fit.
        progress: whether to predict; without, a trajectory is expected to end with this turn.
        patience_s: waiting time after which a turn is placed regardless of room. What is placed so makes
            others compute their contexts again, so that it had better be as long as a sandbox can wait.
        block_tokens: tokens per block of the index: the engine's block, or a multiple of it.
        weights: of the terms of the cost.
    """

    order: Literal["longest", "shortest", "arrival"] = "shortest"
    admission: bool = True
    progress: bool = True
    patience_s: float = 600.0
    block_tokens: int = 64
    weights: Weights = field(default_factory=Weights)
