"""NeMo-RL's own placement: each request to the next replica in turn."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_war.routing.scheduler import Placement, ReplicaFacts, TurnFacts, healthy


class RoundRobin:
    """Sees neither request nor load, as `VllmGeneration` of NeMo-RL does."""

    def __init__(self) -> None:
        self._next = 0

    def begin_step(self, trajectories: int) -> None:
        """Nothing is kept between steps but the turn counter."""

    def choose(self, turn: TurnFacts, replicas: Sequence[ReplicaFacts]) -> Placement:
        """The next healthy replica in order."""
        serving = healthy(replicas)
        replica = serving[self._next % len(serving)]
        self._next += 1
        return Placement(replica, turn.metadata.trajectory)

    def finish(self, placement: Placement) -> None:
        """No load is counted, so there is none to release."""
