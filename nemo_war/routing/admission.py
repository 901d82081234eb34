"""How many trajectories a replica's KV cache can hold, and which must wait.

More live trajectories than the cache holds evict each other between turns, and every
turn then prefills its whole context again: past that point throughput falls to that of
no cache at all. So a replica is given only what fits (ThunderAgent, arXiv 2602.13692).

A live trajectory claims the KV that it brings: its context but for what was there when
it came, of siblings, or its own, where it was paused and the cache has kept it. The claim
lasts across its tool calls, while it is likely to resume soon. Where the claims outgrow
the cache some trajectories are paused between turns, those that lose least: the shortest.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

GROWTH_SHARE = 0.0
"""Part of the expected growth that has to fit as well. Simulated on tau-bench with room for a third of the
trajectories, none is best (216 s against 249 s at 0.2 and 289 s at 0.5): pausing is cheap where the room was
overestimated, while room that is kept free serves nobody."""
_PATIENCE = 8.0
"""Mean tool calls after which one that has not returned no longer keeps room from others."""
_GAP_MEMORY = 0.99
"""Per tool call, for their mean duration."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a trajectory has and needs of a replica's KV cache, in tokens.

    Attributes:
        trajectory: whose it is.
        context: all of its context so far.
        growth: expected growth from here on.
        shared: beginning of its context that was there when it came.
        idle_since: when its last turn ended; None while one runs.
    """

    trajectory: str
    context: int
    growth: float
    shared: int = 0
    idle_since: float | None = None

    @property
    def held(self) -> int:
        """Tokens of KV that are there for its sake."""
        return max(0, self.context - self.shared)


@dataclass(slots=True)
class _Cache:
    """The claims on one replica, and their sums."""

    claims: dict[str, Claim] = field(default_factory=dict)
    held: int = 0
    growth: float = 0.0

    def add(self, claim: Claim) -> None:
        self.claims[claim.trajectory] = claim
        self.held += claim.held
        self.growth += claim.growth

    def remove(self, trajectory: str) -> Claim:
        claim = self.claims.pop(trajectory)
        self.held -= claim.held
        self.growth = self.growth - claim.growth if self.claims else 0.0
        return claim


class Admission:
    """Claims of live trajectories on the KV caches of replicas."""

    def __init__(self, growth_share: float = GROWTH_SHARE) -> None:
        self._growth_share = growth_share
        self._caches: dict[int, _Cache] = {}
        self._home: dict[str, int] = {}
        self._gap_s: float | None = None

    def admits(self, replica: int, capacity: int, wanted: Claim, now: float) -> bool:
        """Whether the trajectory's next turn may run there; may pause others to make it so.

        One that has a claim there goes on while the contexts fit; a newcomer needs room for
        what all are expected to grow by as well. A replica without any claim takes everyone.

        Args:
            replica: where.
            capacity: of its KV cache, in tokens; 0 where unknown, and then there is room.
            wanted: what the turn would claim.
            now: the time.
        """
        cache = self._caches.get(replica)
        if not capacity or cache is None or not cache.claims:
            return True
        claim = cache.claims.get(wanted.trajectory)
        if claim is not None:
            grown = max(0, wanted.context - claim.shared) - claim.held
            return cache.held + grown <= capacity or self._pause_shorter(cache, capacity - grown, wanted)
        if not self._fits(cache, capacity, wanted):
            self._lapse(cache, now)
        return not cache.claims or self._fits(cache, capacity, wanted)

    def claim(self, replica: int, wanted: Claim, now: float) -> None:
        """The trajectory's turn was placed there; a claim elsewhere ends."""
        home, before = self._home.get(wanted.trajectory), self.release(wanted.trajectory)
        if before is not None and home == replica:
            wanted = replace(wanted, shared=before.shared)
        if before is not None and before.idle_since is not None:
            gap = now - before.idle_since
            mean = gap if self._gap_s is None else self._gap_s
            self._gap_s = mean + (1 - _GAP_MEMORY) * (gap - mean)
        self._caches.setdefault(replica, _Cache()).add(wanted)
        self._home[wanted.trajectory] = replica

    def idle(self, trajectory: str, context: int, growth: float, now: float) -> None:
        """Its turn is over; the claim stays, at what it is now."""
        home = self._home.get(trajectory)
        if home is not None:
            claim = self._caches[home].remove(trajectory)
            self._caches[home].add(replace(claim, context=context, growth=growth, idle_since=now))

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
        for cache in self._caches.values():
            claims = cache.claims.values()
            if cache.held != sum(claim.held for claim in claims):
                return False
            if abs(cache.growth - sum(claim.growth for claim in claims)) > 1e-3:
                return False
        named = {name: number for number, cache in self._caches.items() for name in cache.claims}
        return named == self._home

    def _fits(self, cache: _Cache, capacity: int, wanted: Claim) -> bool:
        grown = self._growth_share * (cache.growth + wanted.growth)
        return cache.held + wanted.held + grown <= capacity

    def _pause_shorter(self, cache: _Cache, capacity: float, wanted: Claim) -> bool:
        """Pause idle trajectories shorter than this one until the rest fits; whether it does."""
        idle = [claim for claim in cache.claims.values() if claim.idle_since is not None]
        for other in sorted(idle, key=lambda claim: claim.context):
            if cache.held <= capacity or other.context >= wanted.context:
                break
            if other.trajectory != wanted.trajectory:
                self.release(other.trajectory)
        if cache.held <= capacity:
            return True
        self.release(wanted.trajectory)  # it is the one that loses least
        return not cache.claims

    def _lapse(self, cache: _Cache, now: float) -> None:
        """End the claims of trajectories whose tool call lasts far longer than usual."""
        if self._gap_s is None:
            return
        for claim in list(cache.claims.values()):
            if claim.idle_since is not None and now - claim.idle_since > _PATIENCE * self._gap_s:
                self.release(claim.trajectory)
