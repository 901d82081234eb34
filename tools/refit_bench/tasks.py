"""What trajectories are asked for while acceptance is measured.

The embedded example's tasks are mostly copied from their own prompts, so that drafts do well there without
any history. Stories are what only the history helps with: nothing of an answer stands in its prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nemo_war.generation.embedded.rollout import Start
from nemo_war.generation.embedded.script import TurnLimits, Verdict
from nemo_war.generation.embedded.workplace import Workplace
from nemo_war.telemetry.records import Pass

_LIVE = Pass("war", "live")
_SIBLINGS = 4
_STORIES = 25
_STORY_TOKENS = 32
_TOPICS = ("the sea", "a train", "winter", "bread", "a clock")
_PEOPLE = ("a baker", "two sisters", "a robot", "a king", "a cat")


class Kind(NamedTuple):
    """A kind of task.

    Attributes:
        sureness: factor on the policy's logits. The bundled model rambles at temperature 1. With 1 / 0.6
            it samples as the example does at 0.6, about as surely as a policy that RL has trained; stories
            need more for siblings to say the same.
        starts: the trajectories of a step.
    """

    sureness: float
    starts: Callable[[Workplace, int], list[Start]]


class Story:
    """One turn of a fixed length."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt

    def limits(self, context: int) -> TurnLimits:
        return TurnLimits(_STORY_TOKENS, exact=True)

    def judge(self, tokens: list[int]) -> Verdict:
        return Verdict(0.0, None)


def _example(place: Workplace, step: int) -> list[Start]:
    grpo = place.config.grpo
    return [
        place.live_start(_LIVE, step, prompt, sibling)
        for prompt in place.dataset.step(step, grpo.num_prompts_per_step)
        for sibling in range(grpo.num_generations_per_prompt)
    ]


def _stories(place: Workplace, step: int) -> list[Start]:
    starts = []
    for number in range(_STORIES):
        who, what = _PEOPLE[number // len(_TOPICS)], _TOPICS[number % len(_TOPICS)]
        prompt = place.chat.prompt([{"role": "user", "content": f"Tell a story of {who} and {what}."}])
        starts += [
            Start(f"{step}/{number}/{each}", f"story {number}", Story(prompt)) for each in range(_SIBLINGS)
        ]
    return starts


KINDS = {"example": Kind(1 / 0.6, _example), "stories": Kind(3.0, _stories)}
