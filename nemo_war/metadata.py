"""What a turn tells the engine about itself: `extra_args["war"]` of a request.

Schedulers and drafters see a request, not a trajectory. These few fields are all
they need to know where the request comes from, and they travel with it through
vLLM's `SamplingParams.extra_args`, which is opaque to vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

KEY = "war"


@dataclass(frozen=True, slots=True)
class TurnMetadata:
    """Identity of one turn.

    Attributes:
        trajectory: unique name of the rollout; the same for all of its turns.
        group: name shared by the siblings (generations of one prompt) of a step,
            and by their successors in later steps when the prompt comes back.
        turn: 0 for the first assistant turn.
        epoch: policy epoch (count of refits) the request is meant for.
        critical: the scheduler expects this trajectory to end the step.
        remaining: expected remaining output tokens of the trajectory, this turn
            included; 0 when unknown.
        learn: whether the tokens may enter the history. False for validation
            rollouts, which must not teach the drafter what training rewards.
    """

    trajectory: str
    group: str
    turn: int = 0
    epoch: int = 0
    critical: bool = False
    remaining: int = 0
    learn: bool = True

    def to_extra_args(self) -> dict[str, Any]:
        """The value for `SamplingParams(extra_args=...)`."""
        return {KEY: asdict(self)}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None) -> TurnMetadata | None:
        """Read the metadata back; None when the request carries none.

        Raises:
            ValueError: the entry is there but is not one this version wrote.
        """
        fields = (extra_args or {}).get(KEY)
        if fields is None:
            return None
        if not isinstance(fields, Mapping):
            raise ValueError(f"extra_args[{KEY!r}] must be a mapping, got {type(fields).__name__}")
        unknown = set(fields) - set(cls.__slots__)
        if unknown:
            raise ValueError(f"extra_args[{KEY!r}] has unknown fields {sorted(unknown)}")
        try:
            return cls(**fields)
        except TypeError as error:
            raise ValueError(f"extra_args[{KEY!r}]: {error}") from None
