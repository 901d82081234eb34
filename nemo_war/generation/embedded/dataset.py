"""A small fixed set of prompts, drawn again epoch after epoch, as RL does with its data."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from nemo_war.generation.embedded.environments.interface import Environment, Task

_VALIDATION_SEED_OFFSET = 1_000_003
"""Validation tasks come from seeds that training never uses."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task and the environment that judges it."""

    environment: str
    task: Task


class Dataset:
    """Training and validation prompts of a run, all a function of the seed.

    Args:
        environments: by name.
        weights: share of each environment, by name.
        size: distinct training prompts.
        seed: of the run.
    """

    def __init__(
        self, environments: Mapping[str, Environment], weights: Mapping[str, float], size: int, seed: int
    ) -> None:
        self._environments = dict(environments)
        self._weights = dict(weights)
        self._seed = seed
        self._training = self._draw(size, seed)

    def step(self, step: int, prompts: int) -> list[Prompt]:
        """Prompts of a training step; every epoch over the set has an order of its own."""
        size = len(self._training)
        picked = []
        for index in range(step * prompts, (step + 1) * prompts):
            epoch, place = divmod(index, size)
            order = random.Random(f"{self._seed}/{epoch}").sample(range(size), size)
            picked.append(self._training[order[place]])
        return picked

    def validation(self, prompts: int) -> list[Prompt]:
        """Prompts that are never trained on."""
        return self._draw(prompts, self._seed + _VALIDATION_SEED_OFFSET)

    def _draw(self, count: int, seed: int) -> list[Prompt]:
        """`count` prompts, shared out by weight; the remainder goes to the heaviest first."""
        total = sum(self._weights.values())
        shares = {name: count * weight / total for name, weight in self._weights.items()}
        counts = {name: int(share) for name, share in shares.items()}
        by_remainder = sorted(shares, key=lambda name: counts[name] - shares[name])
        for name in by_remainder[: count - sum(counts.values())]:
            counts[name] += 1
        return [
            Prompt(name, task)
            for name, environment in self._environments.items()
            if counts[name]
            for task in environment.tasks(seed, counts[name])
        ]
