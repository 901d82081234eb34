"""Sticky placement: a trajectory stays where its KV is, siblings share a replica.

The first turn of a trajectory decides. Siblings share their prompt's KV and are each
other's best drafts, so they go together, up to a replica's fair share of the step: a
large group must not starve the other replicas. Where there is no sibling to join, the
least loaded replica is taken; ties are broken at random from a seed, since a fixed
order would send every quiet moment's work to replica 0.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

from nemo_war.routing.scheduler import Placement, ReplicaFacts, TurnFacts, healthy

_UNANNOUNCED_SHARE = 1.25
"""Without an announced step size the share grows with what is live: an even split and a quarter more."""


class Sticky:
    """Sticky by trajectory, siblings together, least loaded first."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._home: dict[str, int] = {}
        self._group_homes: dict[str, Counter[int]] = {}
        self._trajectories: Counter[int] = Counter()
        self._in_flight: Counter[int] = Counter()
        self._expected = 0

    def begin_step(self, trajectories: int) -> None:
        """Forget the last step's homes: its trajectories are over and its KV is about to be void."""
        self._home.clear()
        self._group_homes.clear()
        self._trajectories.clear()
        self._expected = trajectories

    def choose(self, turn: TurnFacts, replicas: Sequence[ReplicaFacts]) -> Placement:
        """The trajectory's home; a new home where it has none or lost it."""
        serving = healthy(replicas)
        trajectory = turn.metadata.trajectory
        home = self._home.get(trajectory)
        if home not in serving:
            if home is not None:
                self._trajectories[home] -= 1
            home = self._settle(trajectory, turn.metadata.group, serving)
        self._in_flight[home] += 1
        return Placement(home, trajectory)

    def finish(self, placement: Placement) -> None:
        """Release the turn's place."""
        if self._in_flight[placement.replica] <= 0:
            raise ValueError(f"replica {placement.replica} has no turn in flight to finish")
        self._in_flight[placement.replica] -= 1

    def in_flight(self, replica: int) -> int:
        """Turns placed on the replica and not finished."""
        return self._in_flight[replica]

    def _settle(self, trajectory: str, group: str, serving: list[int]) -> int:
        homes = self._group_homes.setdefault(group, Counter())
        room = [replica for replica in serving if self._trajectories[replica] < self._share(len(serving))]
        with_siblings = [replica for replica in room if homes[replica]]
        home = self._least_loaded(with_siblings or room or serving)
        self._home[trajectory] = home
        homes[home] += 1
        self._trajectories[home] += 1
        return home

    def _share(self, serving: int) -> int:
        live = self._trajectories.total() + 1
        return math.ceil(max(self._expected, _UNANNOUNCED_SHARE * live) / serving)

    def _least_loaded(self, candidates: list[int]) -> int:
        def load(replica: int) -> tuple[int, int]:
            return self._trajectories[replica], self._in_flight[replica]

        lightest = min(map(load, candidates))
        return self._random.choice([replica for replica in candidates if load(replica) == lightest])
