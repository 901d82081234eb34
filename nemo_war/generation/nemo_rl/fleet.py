"""The replicas of a NeMo-RL generation: each is asked by the leader of its workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray

from nemo_war.config import WarConfig
from nemo_war.generation.step_time import StepTimeModel
from nemo_war.routing.facts import ReplicaFacts


class Fleet:
    """The way to the replicas, for one process; a copy of it goes to others."""

    def __init__(self, leaders: Sequence[Any]) -> None:
        """Ask nothing yet.

        Args:
            leaders: actor handle of each replica's leading worker, by its number.
        """
        self._leaders = tuple(leaders)
        self._facts: list[ReplicaFacts] = []

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self._leaders)

    def start(self, war: WarConfig) -> None:
        """Have each prove that its drafter is active, and say what its KV cache holds."""
        self._facts = [
            ReplicaFacts(
                number,
                kv_tokens=facts["kv_tokens"],
                step_time=StepTimeModel(war.speculative.step_time_prior),
                speculates=war.speculative.enabled,
            )
            for number, facts in enumerate(self.ask_all("start"))
        ]

    def facts(self, serving: Sequence[int]) -> Sequence[ReplicaFacts]:
        """The replicas as they are now; unchanged ones keep their records, by which policies know them.

        Args:
            serving: numbers of those that may be given work.
        """
        if {facts.replica for facts in self._facts if facts.healthy} != set(serving):
            self._facts = [
                facts
                if facts.healthy == (facts.replica in serving)
                else replace(facts, healthy=not facts.healthy)
                for facts in self._facts
            ]
        return self._facts

    def ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `worker.Host` on every replica, and wait for all answers."""
        return ray.get([leader.war.remote(method, *arguments) for leader in self._leaders])

    async def ask(self, number: int, method: str, *arguments: Any) -> Any:
        """Call a method of `worker.Host` on one; a shared object among the arguments stands for its value."""
        return await self._leaders[number].war.remote(method, *arguments)
