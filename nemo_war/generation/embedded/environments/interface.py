"""The environment interface, shaped like NeMo-RL's `EnvironmentInterface`.

An environment written for one runs under the other: same method, same batching,
same fields. The embedded run calls `step` with batches of one, as trajectories
advance independently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Message = dict[str, str]
"""`{"role": "user" | "assistant" | "system" | "tool", "content": text}`."""

MessageLog = list[Message]


class EnvironmentReturn(NamedTuple):
    """Result of one batched step; every field has one entry per trajectory.

    Attributes:
        observations: the message to append (`role`, `content`).
        metadata: the environment's state for the next step; None once terminated.
        next_stop_strings: stop strings for the next turn, or None.
        rewards: reward of this turn; a trajectory's reward is their sum.
        terminateds: whether the episode ended with this turn.
        answers: what the environment read as the answer, for logs; or None.
    """

    observations: list[Message]
    metadata: list[Any]
    next_stop_strings: list[list[str] | None]
    rewards: list[float]
    terminateds: list[bool]
    answers: list[str | None] | None = None


@dataclass(frozen=True)
class Task:
    """One prompt.

    Attributes:
        name: stable name; the same task drawn again in a later step has the same.
        messages: the conversation before the first assistant turn.
        metadata: what the environment's first `step` wants.
        stop_strings: stop strings of the first turn.
    """

    name: str
    messages: MessageLog
    metadata: Any
    stop_strings: list[str] | None = field(default=None)


class Environment(Protocol):
    """A seeded source of tasks and the judge of their turns."""

    def tasks(self, seed: int, count: int) -> list[Task]:
        """`count` tasks, a pure function of the seed."""
        ...

    def step(self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Any]) -> EnvironmentReturn:
        """Judge the last assistant message of each log."""
        ...
