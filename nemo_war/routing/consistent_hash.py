"""Consistent hashing of trajectories: the same one to the same replica, without any books.

Rendezvous hashing (Thaler and Ravishankar 1998): the replica with the highest hash of
(trajectory, replica) wins. Of a lost replica's trajectories each goes to its own second
choice, all others stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from nemo_war.routing.facts import Books, ReplicaFacts, Waiting
from nemo_war.routing.policy import Policy


class ConsistentHash(Policy):
    """Sticky without memory, and blind to load."""

    def choose(self, turn: Waiting, candidates: Sequence[ReplicaFacts], books: Books, now: float) -> int:
        """The replica that this trajectory's name prefers among the healthy ones."""
        return preferred(turn.turn.metadata.trajectory, [facts.replica for facts in candidates])


def preferred(trajectory: str, replicas: Sequence[int]) -> int:
    """The replica with the highest hash for this trajectory."""

    def weight(replica: int) -> bytes:
        # Names of HTTP clients may hold halves of characters.
        name = f"{replica}/{trajectory}".encode(errors="surrogatepass")
        return blake2b(name, digest_size=8).digest()

    return max(replicas, key=weight)
