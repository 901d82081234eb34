"""What is rolled out: steps of groups of multi-turn trajectories, whose tasks come back, as in GRPO."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from nemo_war.generation.embedded.rollout import Start
from nemo_war.generation.embedded.script import TurnLimits, Verdict


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much there is to do; pairs are the least and the most.

    Attributes:
        tasks: prompts that there are. A refit that leaves KV behind shows where a prompt comes back.
        groups: of a step.
        siblings: of a group.
        prompt: tokens of a task.
        turns: of a trajectory.
        output: tokens that a turn may have.
        observation: tokens between two turns.
        tokens: token ids to draw from.
    """

    tasks: int
    groups: int
    siblings: int
    prompt: tuple[int, int]
    turns: tuple[int, int]
    output: tuple[int, int]
    observation: tuple[int, int]
    tokens: tuple[int, int]


class Dialogue:
    """A `Script` of drawn turns, whatever is answered."""

    def __init__(self, prompt: list[int], turns: list[tuple[TurnLimits, list[int]]]) -> None:
        self.prompt = prompt
        self._turns = list(turns)

    def limits(self, context: int) -> TurnLimits | None:
        return self._turns[0][0] if self._turns else None

    def judge(self, tokens: list[int]) -> Verdict:
        _, observation = self._turns.pop(0)
        return Verdict(0.0, observation if self._turns else None)


class Workload:
    """Draws steps."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        self._sizes, self._draw = sizes, Random(f"workload {seed}")
        self._tasks = [self._tokens(sizes.prompt) for _ in range(sizes.tasks)]

    def step(self, number: int) -> list[Start]:
        """The trajectories of a step."""
        sizes = self._sizes
        chosen = self._draw.sample(range(sizes.tasks), sizes.groups)
        return [
            Start(f"step{number}/task{task}/{sibling}", f"task{task}", self._dialogue(task))
            for task in chosen
            for sibling in range(sizes.siblings)
        ]

    def _dialogue(self, task: int) -> Dialogue:
        turns = []
        for _ in range(self._draw.randint(*self._sizes.turns)):
            tokens = self._draw.randint(*self._sizes.output)
            limits = TurnLimits(tokens, exact=self._draw.random() < 0.5)
            turns.append((limits, self._tokens(self._sizes.observation)))
        return Dialogue(list(self._tasks[task]), turns)

    def _tokens(self, length: tuple[int, int]) -> list[int]:
        low, high = self._sizes.tokens
        return [self._draw.randrange(low, high) for _ in range(self._draw.randint(*length))]
