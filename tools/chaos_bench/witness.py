"""Who sees every turn from the caller's side: what was asked for, and what came back, once each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from nemo_war.generation.embedded.rollout import Trajectory
from nemo_war.generation.embedded.turn import Answer, Turn

Key = tuple[str, int]
"""A turn: its trajectory and its number."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A turn that was answered.

    Attributes:
        turn: as the caller gave it.
        replica: that served it.
        answer: as the caller got it.
        began: the fleet's epoch when the caller asked.
        ended: the fleet's epoch when the caller was answered.
    """

    turn: Turn
    replica: int
    answer: Answer
    began: int
    ended: int

    @property
    def name(self) -> str:
        return f"{self.turn.metadata.trajectory} turn {self.turn.metadata.turn} (replica {self.replica})"


class Witness:
    """Counts turns.

    Attributes:
        started, finished: turns.
        pending: turns asked for and not answered.
        attempts: of the turns that are pending, how often they were placed.
        most_attempts: of any turn.
    """

    def __init__(self) -> None:
        self.started = self.finished = self.most_attempts = 0
        self._lost: list[str] = []
        self._again: list[str] = []
        self.pending: dict[Key, Turn] = {}
        self.attempts: Counter[Key] = Counter()
        self._answers: dict[str, list[Answered]] = {}

    def asks(self, turn: Turn) -> None:
        """The caller asks for a turn."""
        key = _key(turn)
        if key in self.pending or any(_key(each.turn) == key for each in self._answers.get(key[0], ())):
            self._again.append(f"{key[0]} turn {key[1]} was asked for twice")
        self.pending[key] = turn
        self.started += 1

    def tries(self, turn: Turn) -> None:
        """The turn is placed on a replica, for the first time or once more."""
        self.attempts[_key(turn)] += 1
        self.most_attempts = max(self.most_attempts, self.attempts[_key(turn)])

    def answers(self, answered: Answered) -> None:
        """The caller has its answer."""
        key = _key(answered.turn)
        if self.pending.pop(key, None) is None:
            self._again.append(f"{answered.name} was answered twice")
        self.attempts.pop(key, None)
        self.finished += 1
        self._answers.setdefault(key[0], []).append(answered)

    def loses(self, turn: Turn, error: BaseException) -> None:
        """The caller has an error."""
        key = _key(turn)
        self.pending.pop(key, None)
        self.attempts.pop(key, None)
        self._lost.append(f"{key[0]} turn {key[1]}: {type(error).__name__}: {error}")

    def take_lost(self) -> list[str]:
        """Turns that raised since this was asked, and what."""
        lost, self._lost = self._lost, []
        return lost

    def take_again(self) -> list[str]:
        """Turns that were asked for, or answered, a second time since this was asked."""
        again, self._again = self._again, []
        return again

    def take(self, trajectory: str) -> list[Answered]:
        """The answers of a trajectory that is over, in the order in which they came; forgets them."""
        return self._answers.pop(trajectory, [])


def misread(trajectory: Trajectory, answers: Iterable[Answered]) -> str:
    """What is wrong with a trajectory, given its turns' answers; empty where it holds each of them once.

    Its history is its prompt, and then the turns: what was answered, and what was given after that.
    """
    tokens, size = trajectory.tokens, trajectory.prompt_length
    logprobs: list[float] = [0.0] * size
    generated = [False] * size
    for number, (each, recorded) in enumerate(zip(answers, trajectory.turns, strict=False)):
        if each.turn.metadata.turn != number:
            return f"{each.name} was answered in the place of turn {number}"
        if each.turn.prompt != tuple(tokens[: len(generated)]):
            return f"{each.name} was asked with another history than its trajectory has"
        if each.answer.tokens != tuple(tokens[len(generated) : len(generated) + recorded.output_tokens]):
            return f"{trajectory.name} holds other tokens than turn {number} was answered with"
        given = len(recorded.observation or ())
        generated += [True] * len(each.answer.tokens) + [False] * given
        logprobs += [*each.answer.logprobs, *[0.0] * given]
    if generated != trajectory.generated or logprobs != trajectory.logprobs:
        return f"{trajectory.name} holds more, or less, than what its turns were answered with"
    return ""


def _key(turn: Turn) -> Key:
    return turn.metadata.trajectory, turn.metadata.turn
