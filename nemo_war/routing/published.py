"""WAR's scheduler as its paper describes it (arXiv 2607.17299), to compare with.

Below a threshold of outstanding requests: sticky sessions, least loaded at first sight.
Above it the queue is served by an additive score whose terms dominate each other in this
order: waiting time beyond a threshold, few expected turns left, KV cached on the target,
few requests in flight there. A window per replica bounds what is in flight, and grows or
shrinks with the replica's prefix hit rate. Here the first two terms order the queue, and
the last two are the choice of the replica: the trajectory's own, else the lightest. The
paper gives no constants; those here are ours, and were not tuned.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_war.routing.facts import Books, Outcome, ReplicaFacts, TurnFacts, Waiting
from nemo_war.routing.policy import Policy, in_flight, trajectories

_LOW_LOAD = 16
"""Outstanding requests per replica below which placement is sticky and nothing waits."""
_PATIENCE_S = 30.0
"""Waiting time beyond which nothing else counts: a sandbox would expire."""
_WINDOW, _LEAST_WINDOW, _MOST_WINDOW = 16.0, 4.0, 256.0
"""Requests in flight allowed on a replica: at first, at least, at most."""
_HIT_RATE = 0.7
"""Hit rate above which the window grows by one request, and below which it shrinks by a tenth."""
_TURNS_MEMORY = 0.8
"""Of the average number of turns of a group's finished trajectories."""
_GROUPS = 4096
"""Groups remembered."""


class Published(Policy):
    """Sticky at low load, a priority queue with a window per replica at high load."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._home: dict[str, int] = {}
        self._group: dict[str, str] = {}
        self._turns: dict[str, int] = {}
        self._expected_turns: dict[str, float] = {}
        self._window: dict[int, float] = {}

    def order(self, waiting: Sequence[Waiting], now: float) -> Sequence[Waiting]:
        """Overdue turns first, oldest first; then those of trajectories with the fewest turns left."""

        def priority(each: Waiting) -> tuple[float, float]:
            overdue = max(0.0, now - each.since - _PATIENCE_S)
            return -overdue, self._turns_left(each.turn)

        return sorted(waiting, key=priority)

    def choose(
        self, turn: Waiting, candidates: Sequence[ReplicaFacts], books: Books, now: float
    ) -> int | None:
        """The home where its window has room, else another with room; none: hold."""
        replicas = [facts.replica for facts in candidates]
        home = self._home.get(turn.turn.metadata.trajectory)
        outstanding = sum(in_flight(books, replica) for replica in replicas)
        if outstanding < _LOW_LOAD * len(replicas):
            return home if home in replicas else self._lightest(replicas, books)
        room = [r for r in replicas if in_flight(books, r) < self._window.get(r, _WINDOW)]
        if now - turn.since > _PATIENCE_S:
            room = replicas
        if not room:
            return None
        return home if home in room else self._lightest(room, books)

    def placed(self, turn: Waiting, replica: int, now: float) -> None:
        """Count the turn and remember the home."""
        name = turn.turn.metadata.trajectory
        self._home[name] = replica
        self._group[name] = turn.turn.metadata.group
        self._turns[name] = self._turns.get(name, 0) + 1

    def finished(self, turn: Waiting, replica: int, outcome: Outcome | None, now: float) -> None:
        """Let the window follow the hit rate."""
        if outcome is None or outcome.cached_tokens is None or turn.turn.metadata.turn == 0:
            return
        window = self._window.get(replica, _WINDOW)
        hit = outcome.cached_tokens >= _HIT_RATE * turn.turn.prompt_tokens
        window = window + 1 if hit else window * 0.9
        self._window[replica] = min(max(window, _LEAST_WINDOW), _MOST_WINDOW)

    def ended(self, trajectory: str) -> None:
        """Its number of turns is evidence for its siblings."""
        self._home.pop(trajectory, None)
        group, turns = self._group.pop(trajectory, None), self._turns.pop(trajectory, 0)
        if group is not None:
            if group not in self._expected_turns and len(self._expected_turns) >= _GROUPS:
                del self._expected_turns[next(iter(self._expected_turns))]
            before = self._expected_turns.get(group, turns)
            self._expected_turns[group] = _TURNS_MEMORY * before + (1 - _TURNS_MEMORY) * turns

    def lost(self, replica: int) -> None:
        """Start again from a small window there."""
        self._window.pop(replica, None)

    def _turns_left(self, turn: TurnFacts) -> float:
        expected = self._expected_turns.get(turn.metadata.group, 1.0)
        return max(0.0, expected - self._turns.get(turn.metadata.trajectory, 0))

    def _lightest(self, replicas: Sequence[int], books: Books) -> int:
        return self._least(replicas, lambda r: (trajectories(books, r), in_flight(books, r)))
