"""What decides how a trajectory goes on: a live environment, or a recording of one.

Live sampling makes different text, and so different work, every time. A speed-up may
only be taken from equal work, so a live pass is recorded and replayed: the same number
of turns, the same output tokens per turn, the same observations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from nemo_war.generation.embedded.chat import Chat
from nemo_war.generation.embedded.environments.interface import Environment, MessageLog, Task


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """How long the next turn may, or must, be.

    Attributes:
        tokens: most output tokens.
        exact: whether it must be exactly that many, EOS or not.
        stop_strings: texts that end the turn.
    """

    tokens: int
    exact: bool = False
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows a turn.

    Attributes:
        reward: of this turn.
        observation: tokens to append; None where the trajectory ends.
    """

    reward: float
    observation: list[int] | None


class Script(Protocol):
    """One trajectory's course."""

    prompt: list[int]

    def limits(self, context: int) -> TurnLimits | None:
        """Limits of the next turn after `context` tokens; None when there is no room for one."""
        ...

    def judge(self, tokens: list[int]) -> Verdict:
        """What follows the turn that generated these tokens."""
        ...


class Judge:
    """Shows an environment the conversation as text, one assistant turn after the other."""

    def __init__(self, environment: Environment, task: Task, chat: Chat) -> None:
        self._environment = environment
        self._chat = chat
        self._log: MessageLog = list(task.messages)
        self._metadata: Any = task.metadata
        self.stop_strings = tuple(task.stop_strings or ())
        self.over = False

    def step(self, tokens: list[int]) -> Verdict:
        """The environment's word on one turn. After the end nothing counts any more."""
        if self.over:
            return Verdict(0.0, None)
        self._log.append({"role": "assistant", "content": self._chat.text(tokens)})
        result = self._environment.step([self._log], [self._metadata])
        self.over = result.terminateds[0]
        if self.over:
            return Verdict(result.rewards[0], None)
        message, self._metadata = result.observations[0], result.metadata[0]
        self.stop_strings = tuple(result.next_stop_strings[0] or ())
        self._log.append(message)
        after_eos = bool(tokens) and tokens[-1] == self._chat.eos
        return Verdict(result.rewards[0], self._chat.observation(message, after_eos=after_eos))


class LiveScript:
    """The environment decides."""

    def __init__(
        self,
        judge: Judge,
        prompt: list[int],
        *,
        max_turns: int,
        max_new_tokens: int,
        max_length: int,
        stop_strings: tuple[str, ...] = (),
    ) -> None:
        self.prompt = prompt
        self._stop_strings = stop_strings
        self._judge = judge
        self._turns_left = max_turns
        self._max_new_tokens = max_new_tokens
        self._max_length = max_length

    def limits(self, context: int) -> TurnLimits | None:
        """At most `max_new_tokens`, and what the context length leaves."""
        tokens = min(self._max_new_tokens, self._max_length - context)
        stop_strings = self._judge.stop_strings + self._stop_strings
        return TurnLimits(tokens, stop_strings=stop_strings) if tokens > 0 else None

    def judge(self, tokens: list[int]) -> Verdict:
        """Ask the environment; the last allowed turn ends the trajectory."""
        self._turns_left -= 1
        verdict = self._judge.step(tokens)
        return verdict if self._turns_left else Verdict(verdict.reward, None)


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """Work of one turn: how many tokens it generated and what was appended after it."""

    output_tokens: int
    observation: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class RecordedTrajectory:
    """Fixed work of one trajectory, with the task it came from for judging."""

    task: Task
    environment: str
    sibling: int
    prompt: tuple[int, ...]
    turns: tuple[RecordedTurn, ...]


class RecordedScript:
    """The recording decides; the environment only says what the text would have earned."""

    def __init__(self, recorded: RecordedTrajectory, judge: Judge) -> None:
        self.prompt = list(recorded.prompt)
        self._judge = judge
        self._turns = list(recorded.turns)

    def limits(self, context: int) -> TurnLimits | None:
        """Exactly the recorded number of tokens."""
        return TurnLimits(self._turns[0].output_tokens, exact=True) if self._turns else None

    def judge(self, tokens: list[int]) -> Verdict:
        """The recorded observation, whatever was said."""
        turn = self._turns.pop(0)
        observation = None if turn.observation is None else list(turn.observation)
        return Verdict(self._judge.step(tokens).reward, observation)
