"""Calculator: a tool environment in which turns end at stop strings.

The model writes `<calc>12*7</calc>`, the observation gives the result, and the model
answers `<answer>84</answer>`. A right answer is worth 1 in all; a first valid tool
call is worth 0.1 of it in advance, so that a trajectory's sum lies within [0, 1].
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from pydantic import Field

from nemo_war.config import StrictModel
from nemo_war.generation.embedded.environments.arithmetic import evaluate, show
from nemo_war.generation.embedded.environments.interface import EnvironmentReturn, MessageLog, Task

STOP_STRINGS = ("</calc>", "</answer>")

_TOOL_REWARD = 0.1
_ACTION = re.compile(r"<(calc|answer)>(.*?)(?:</|\Z)", re.DOTALL)
"""An engine may leave the stop string out of the text, hence the end of the text."""
_NUMBER = re.compile(r"-?[0-9]{1,30}(?:\.[0-9]{1,30})?")
_SHOWN_CHARACTERS = 40


class CalculatorConfig(StrictModel):
    """`env.calculator`."""

    operands: int = Field(3, ge=2, le=8, description="Numbers in the expression asked for.")
    max_operand: int = Field(99, ge=2, le=9999, description="Largest of these numbers; the smallest is 1.")


@dataclass(frozen=True)
class CalculatorState:
    """What the environment remembers of a trajectory.

    Attributes:
        result: the right answer.
        earned: reward given so far.
    """

    result: int
    earned: float = 0.0


@dataclass(frozen=True)
class _Outcome:
    """One judged turn of one trajectory."""

    observation: str
    reward: float = 0.0
    terminated: bool = False
    answer: str | None = None


class CalculatorEnvironment:
    """Seeded sums; the job's `max_rollout_turns` bounds the attempts."""

    def __init__(self, config: CalculatorConfig) -> None:
        self._config = config

    def tasks(self, seed: int, count: int) -> list[Task]:
        """`count` tasks, a pure function of the seed; fewer are a prefix of more."""
        return [self._task(seed, index) for index in range(count)]

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[CalculatorState]
    ) -> EnvironmentReturn:
        """Carry out the tool call, or judge the answer, in the last message of each log."""
        outcomes = [
            _judge(log[-1]["content"], state) for log, state in zip(message_log_batch, metadata, strict=True)
        ]
        return EnvironmentReturn(
            observations=[{"role": "user", "content": outcome.observation} for outcome in outcomes],
            metadata=[
                None if outcome.terminated else replace(state, earned=state.earned + outcome.reward)
                for state, outcome in zip(metadata, outcomes, strict=True)
            ],
            next_stop_strings=[None if outcome.terminated else list(STOP_STRINGS) for outcome in outcomes],
            rewards=[outcome.reward for outcome in outcomes],
            terminateds=[outcome.terminated for outcome in outcomes],
            answers=[outcome.answer for outcome in outcomes],
        )

    def _task(self, seed: int, index: int) -> Task:
        rng = random.Random(f"calculator/{seed}/{index}")
        terms = [str(rng.randint(1, self._config.max_operand))]
        for _ in range(self._config.operands - 1):
            terms += [rng.choice("+-*"), str(rng.randint(1, self._config.max_operand))]
        expression = "".join(terms)
        return Task(
            name=f"calculator-{seed}-{index}",
            messages=[
                {"role": "system", "content": "You use a calculator."},
                *_example("2*3+1"),
                *_example("50-8"),
                {"role": "user", "content": _request(expression)},
            ],
            metadata=CalculatorState(int(evaluate(expression))),
            stop_strings=list(STOP_STRINGS),
        )


def _judge(text: str, state: CalculatorState) -> _Outcome:
    """The first action counts: a turn would have ended there."""
    action = _ACTION.search(text)
    if action is None:
        return _Outcome("Write <calc>expression</calc> or <answer>number</answer>.")
    kind, body = action.groups()
    if kind == "answer":
        return _judge_answer(body, state)
    try:
        result = evaluate(body)
    except ValueError as error:
        return _Outcome(f"The calculator cannot read `{body.strip()[:_SHOWN_CHARACTERS]}`: {error}.")
    return _Outcome(_result_text(result), reward=_TOOL_REWARD if state.earned == 0.0 else 0.0)


def _judge_answer(body: str, state: CalculatorState) -> _Outcome:
    """The last number counts, as small models write `12*7 = 84`."""
    numbers = _NUMBER.findall(body)
    answer = numbers[-1] if numbers else None
    right = answer is not None and Fraction(answer) == state.result
    return _Outcome(
        observation="Right." if right else "Wrong.",
        reward=1.0 - state.earned if right else 0.0,
        terminated=True,
        answer=answer,
    )


def _example(expression: str) -> MessageLog:
    """A worked example; without some, a small model writes anything but the tags."""
    result = evaluate(expression)
    return [
        {"role": "user", "content": _request(expression)},
        {"role": "assistant", "content": f"<calc>{expression}</calc>"},
        {"role": "user", "content": _result_text(result)},
        {"role": "assistant", "content": f"<answer>{show(result)}</answer>"},
    ]


def _request(expression: str) -> str:
    return f"Compute {expression} between <calc> and </calc>."


def _result_text(result: Fraction) -> str:
    return f"The result is {show(result)}. Write it between <answer> and </answer>."
