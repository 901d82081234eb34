"""NeMo-RL's own placement: each request to the next replica in turn."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_war.routing.facts import Books, ReplicaFacts, Waiting
from nemo_war.routing.policy import Policy


class RoundRobin(Policy):
    """Sees neither request nor load, as `VllmGeneration` of NeMo-RL does."""

    _next = 0

    def choose(self, turn: Waiting, candidates: Sequence[ReplicaFacts], books: Books, now: float) -> int:
        """The next healthy replica in order."""
        self._next += 1
        return candidates[(self._next - 1) % len(candidates)].replica
