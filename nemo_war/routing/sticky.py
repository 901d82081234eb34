"""Sticky placement: a trajectory stays where its KV is, siblings share a replica.

The first turn of a trajectory decides. Siblings share their prompt's KV and are each
other's best drafts, so they go together, up to a replica's fair share of the step: a
large group must not starve the other replicas. Where there is no sibling to join, the
least loaded replica is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nemo_war.metadata import TurnMetadata
from nemo_war.routing.facts import Books, ReplicaFacts, Waiting
from nemo_war.routing.policy import Policy, in_flight, trajectories
from nemo_war.routing.siblings import Siblings

_UNANNOUNCED_SHARE = 1.25
"""Without an announced step size the share grows with what is live: an even split and a quarter more."""


class Sticky(Policy):
    """Sticky by trajectory, siblings together, least loaded first."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._home: dict[str, int] = {}
        self._siblings = Siblings()
        self._expected = 0

    def begin_step(self, trajectories: int) -> None:
        """Forget the last step's homes: its trajectories are over and its KV is about to be void."""
        self._home.clear()
        self._siblings.clear()
        self._expected = trajectories

    def choose(self, turn: Waiting, candidates: Sequence[ReplicaFacts], books: Books, now: float) -> int:
        """The trajectory's home; a new one where it has none or lost it."""
        replicas = [facts.replica for facts in candidates]
        metadata = turn.turn.metadata
        home = self._home.get(metadata.trajectory)
        return home if home in replicas else self._settle(metadata, replicas, books)

    def placed(self, turn: Waiting, replica: int, now: float) -> None:
        """Remember the home."""
        metadata = turn.turn.metadata
        if self._home.get(metadata.trajectory) != replica:
            self._home[metadata.trajectory] = replica
            self._siblings.placed(metadata.group, metadata.trajectory, replica)

    def ended(self, trajectory: str) -> None:
        """Forget the home; its group's stay known, for siblings that are yet to come."""
        self._home.pop(trajectory, None)

    def _settle(self, metadata: TurnMetadata, replicas: list[int], books: Books) -> int:
        live = sum(trajectories(books, replica) for replica in replicas) + 1
        share = math.ceil(max(self._expected, _UNANNOUNCED_SHARE * live) / len(replicas))
        room = [replica for replica in replicas if trajectories(books, replica) < share]
        siblings = self._siblings.where(metadata.group, metadata.trajectory)
        with_siblings = [replica for replica in siblings if replica in room]

        def load(replica: int) -> tuple[int, int]:
            return trajectories(books, replica), in_flight(books, replica)

        return self._least(with_siblings or room or replicas, load)
