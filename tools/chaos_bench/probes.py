"""What replicas of real engines say of a prompt: the same in one epoch, and something else in the next.

Nobody computes it anew on the side, as that takes another engine. A replica that was started again has
computed it anew, and any that serves older weights, or KV of older weights, disagrees with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from nemo_war.generation.self_check import Probe, distance
from tools.chaos_bench.fleet import ObservedFleet

EQUAL = 2e-3
"""Nats between two float32 engines on equal weights: batches of other sizes sum in another order."""
DIFFERENT = 0.05
"""Nats between two policies, at least."""

Said = Mapping[int, float]
"""Logprobs of the likeliest next tokens."""


class Probes:
    """Asks now and then, and compares.

    Attributes:
        answers: that were compared with others.
    """

    def __init__(self, fleet: ObservedFleet) -> None:
        self._fleet = fleet
        self._before: tuple[int, Said] | None = None
        self._wrong: list[str] = []
        self.answers = 0

    async def look(self) -> None:
        """Ask every replica that serves, between two refits."""
        epoch = self._fleet.epoch
        probes: Mapping[int, Probe] = await self._fleet.ask("probe")
        said = {number: probe.cached for number, probe in probes.items()}
        if self._fleet.epoch != epoch:
            return
        self._wrong += disagreements(epoch, said, self._before)
        self.answers += len(said)
        if said:
            self._before = (epoch, next(iter(said.values())))

    def take(self) -> list[str]:
        """What was not as it should be since this was asked."""
        wrong, self._wrong = self._wrong, []
        return wrong


def disagreements(epoch: int, said: Mapping[int, Said], before: tuple[int, Said] | None = None) -> list[str]:
    """What is wrong with what replicas say.

    Args:
        epoch: they are in.
        said: by replica.
        before: epoch of what any replica said before, and what it was; the epoch may be the same.
    """
    wrong = []
    pairs = list(said.items())
    for (one, first), (other, second) in pairwise(pairs):
        if (apart := distance(first, second)) > EQUAL:
            wrong.append(f"replicas {one} and {other} are {apart:.4f} nats apart in epoch {epoch}")
    for replica, each in pairs if before else ():
        then, what = before
        apart = distance(each, what)
        if then == epoch and apart > EQUAL:
            wrong.append(f"replica {replica} is {apart:.4f} nats from what was said in its epoch {epoch}")
        if then != epoch and apart < DIFFERENT:
            wrong.append(f"replica {replica} says in epoch {epoch} what was said in epoch {then}")
    return wrong
