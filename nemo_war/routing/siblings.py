"""Where the siblings of a trajectory are: what they have in common lies there, KV and drafts."""

from __future__ import annotations

_GROUPS = 4096
"""Groups remembered where no step ever begins, as in front of HTTP clients."""


class Siblings:
    """The replicas that the trajectories of each group were placed on, in this step."""

    def __init__(self) -> None:
        # Per group and replica the one trajectory that was there; None where there were several.
        self._places: dict[str, dict[int, str | None]] = {}

    def where(self, group: str, trajectory: str) -> list[int]:
        """The replicas that have, or had, another one of the group than this trajectory."""
        places = self._places.get(group)
        return [] if places is None else [replica for replica, only in places.items() if only != trajectory]

    def placed(self, group: str, trajectory: str, replica: int) -> None:
        """One of the group was placed there."""
        places = self._places.get(group)
        if places is None:
            if len(self._places) >= _GROUPS:
                del self._places[next(iter(self._places))]
            places = self._places[group] = {}
        if places.setdefault(replica, trajectory) != trajectory:
            places[replica] = None

    def lost(self, replica: int) -> None:
        """The replica holds nothing any more."""
        for places in self._places.values():
            places.pop(replica, None)

    def clear(self) -> None:
        """A new step: no group has any trajectory yet."""
        self._places.clear()
