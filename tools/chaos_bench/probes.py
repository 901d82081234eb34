"""What replicas of real engines say of a prompt: the same in one epoch, and something else in the next.

Nobody computes it anew on the side, as that takes another engine. A replica that was started again has
computed it anew, and any that serves older weights, or KV of older weights, disagrees with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from nemo_war.generation.embedded.turn import Turn
from nemo_war.metadata import TurnMetadata
from tools.chaos_bench.fleet import ObservedFleet

EQUAL = 2e-3
"""Nats between two float32 engines on equal weights: batches of other sizes sum in another order."""
DIFFERENT = 0.05
"""Nats between two policies, at least."""
_LENGTH = 200
"""Tokens of the prompt: several blocks of KV, as what does not fill a block is never cached."""

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
        self._count = 0
        self._wrong: list[str] = []
        self.answers = 0

    async def look(self) -> None:
        """Ask every replica that serves, between two refits."""
        epoch = self._fleet.epoch
        self._count += 1
        metadata = TurnMetadata(f"probe{self._count}", "probe", epoch=epoch, learn=False)
        said = await self._fleet.ask("likeliest", Turn(tuple(range(1000, 1000 + _LENGTH)), metadata, 1))
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


def distance(one: Said, other: Said) -> float:
    """Largest difference over the tokens that both name, in nats; infinite where there is none."""
    common = one.keys() & other.keys()
    return max((abs(one[token] - other[token]) for token in common), default=float("inf"))
