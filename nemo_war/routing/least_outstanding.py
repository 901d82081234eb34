"""Least outstanding requests, as `GenerationRouter` of NeMo-RL places each request."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_war.routing.facts import Books, ReplicaFacts, Waiting
from nemo_war.routing.policy import Policy, in_flight


class LeastOutstanding(Policy):
    """Sees the load, and nothing of where KV lies."""

    def choose(self, turn: Waiting, candidates: Sequence[ReplicaFacts], books: Books, now: float) -> int:
        """The replica with the fewest turns in flight."""
        return self._least([facts.replica for facts in candidates], lambda replica: in_flight(books, replica))
