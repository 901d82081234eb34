"""How many trajectories a replica's KV cache can hold, and which must wait.

More live trajectories than the cache holds evict each other between turns, and every
turn then prefills its whole context again: past that point throughput falls to that of
no cache at all. So a replica is given only what fits (ThunderAgent, arXiv 2602.13692).

A live trajectory claims the KV that it brings: its context but for what was there when
it came, of siblings, or its own, where it was paused and the cache has kept it. Newcomers
leave room for the growth of those who are there, as much as `headroom` has learned. A
claim lasts across a tool call for as long as its room would not serve others better.
Where the claims outgrow the cache some trajectories are paused between turns, those that
lose least: the shortest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from nemo_war.routing.headroom import Headroom

_KEEP = 2.0
"""Times `Costs.keeping_s` that an idle claim is kept. Simulated makespans at 1, 2 and 4: 286, 282, 327 s for
tau-bench with room for a sixth; for coding sessions with room for six on a replica 936, 906 and 906 s, with
room for three 1369, 1307 and 1283 s."""


class Claim(NamedTuple):
    """What a trajectory has of a replica's KV cache, in tokens.

    Attributes:
        trajectory: whose it is.
        context: all of its context so far.
        shared: beginning of its context that was there when it came.
        idle_since: when its last turn ended; None while one runs.
    """

    trajectory: str
    context: int
    shared: int = 0
    idle_since: float | None = None

    @property
    def held(self) -> int:
        """Tokens of KV that are there for its sake."""
        return max(0, self.context - self.shared)


@dataclass(slots=True)
class _Cache:
    """The claims on one replica, those that changed first first, and their sum."""

    claims: dict[str, Claim] = field(default_factory=dict)
    held: int = 0

    def add(self, claim: Claim) -> None:
        self.claims[claim.trajectory] = claim
        self.held += claim.held

    def remove(self, trajectory: str) -> Claim:
        claim = self.claims.pop(trajectory)
        self.held -= claim.held
        return claim


class Admission:
    """Claims of live trajectories on the KV caches of replicas.

    Attributes:
        headroom: what newcomers leave free.
    """

    def __init__(self) -> None:
        self.headroom = Headroom()
        self._caches: dict[int, _Cache] = {}
        self._home: dict[str, int] = {}

    def admits(self, replica: int, capacity: int, wanted: Claim, now: float, keeping_s: float) -> bool:
        """Whether the trajectory's next turn may run there; may pause others to make it so.

        One that has a claim there goes on while the contexts fit; a newcomer leaves headroom as well.
        A replica without any claim takes everyone.

        Args:
            replica: where.
            capacity: of its KV cache, in tokens; 0 where unknown, and then there is room.
            wanted: what the turn would claim.
            now: the time.
            keeping_s: seconds that a token of idle KV is worth keeping for, as in `Costs`.
        """
        cache = self._caches.get(replica)
        if not capacity or cache is None or not cache.claims:
            return True
        claim = cache.claims.get(wanted.trajectory)
        if claim is not None:
            grown = max(0, wanted.context - claim.shared) - claim.held
            return cache.held + grown <= capacity or self._pause_shorter(cache, capacity - grown, wanted)
        room = capacity * (1 - self.headroom.share) - wanted.held
        if cache.held > room:
            self._lapse(cache, now - _KEEP * keeping_s * cache.held / len(cache.claims))
        return not cache.claims or cache.held <= room

    def claim(self, replica: int, wanted: Claim) -> None:
        """The trajectory's turn was placed there; a claim elsewhere ends."""
        home, before = self._home.get(wanted.trajectory), self.release(wanted.trajectory)
        if before is not None and home == replica:
            wanted = Claim(wanted.trajectory, wanted.context, before.shared)
        self._caches.setdefault(replica, _Cache()).add(wanted)
        self._home[wanted.trajectory] = replica

    def idle(self, trajectory: str, context: int, now: float) -> None:
        """Its turn is over; the claim stays, at what it is now."""
        home = self._home.get(trajectory)
        if home is not None:
            claim = self._caches[home].remove(trajectory)
            self._caches[home].add(Claim(trajectory, context, claim.shared, now))

    def release(self, trajectory: str) -> Claim | None:
        """It is over, paused or elsewhere."""
        home = self._home.pop(trajectory, None)
        return None if home is None else self._caches[home].remove(trajectory)

    def lost(self, replica: int) -> None:
        """Nothing is held there any more."""
        cache = self._caches.pop(replica, None)
        for trajectory in cache.claims if cache else ():
            del self._home[trajectory]

    def home(self, trajectory: str) -> int | None:
        """Where the trajectory has a claim."""
        return self._home.get(trajectory)

    def context(self, trajectory: str) -> int:
        """Tokens of context that it has there; 0 where it has no claim."""
        home = self._home.get(trajectory)
        return 0 if home is None else self._caches[home].claims[trajectory].context

    def check_integrity(self) -> bool:
        """Whether the sums agree with the claims; for tests."""
        named = {name: number for number, cache in self._caches.items() for name in cache.claims}
        return named == self._home and all(
            cache.held == sum(claim.held for claim in cache.claims.values())
            for cache in self._caches.values()
        )

    def _pause_shorter(self, cache: _Cache, capacity: float, wanted: Claim) -> bool:
        """Pause idle shorter trajectories if then the rest fits, else this one; whether it may go on."""
        excess = cache.held - capacity
        idle = [claim for claim in cache.claims.values() if claim.idle_since is not None]
        paused = []
        for other in sorted(idle, key=lambda claim: claim.context):
            if excess <= 0 or other.context >= wanted.context:
                break
            if other.trajectory != wanted.trajectory:
                excess -= other.held
                paused.append(other)
        if excess > 0:  # it is the one that loses least, or pausing others would not do
            paused = [wanted]
        for each in paused:
            self.release(each.trajectory)
        return excess <= 0 or not cache.claims

    def _lapse(self, cache: _Cache, since: float) -> None:
        """End the claims of trajectories that have been idle since then, or for longer."""
        lapsed = []
        for claim in cache.claims.values():
            if claim.idle_since is None:
                continue
            if claim.idle_since > since:
                break
            lapsed.append(claim.trajectory)
        for trajectory in lapsed:
            self.release(trajectory)
