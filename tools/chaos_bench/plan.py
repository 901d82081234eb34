"""Which faults befall whom, in which order: drawn beforehand, from a seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

from tools.chaos_bench.kinds import Kind

SCHEDULER = -1
"""In the place of a replica's number."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One of a plan.

    Attributes:
        number: from 0.
        kind: its name.
        replica: that it befalls; `SCHEDULER` if that is none.
        delay_s: how long the replica has served before.
        seed: of what is left to chance when it happens.
    """

    number: int
    kind: str
    replica: int
    delay_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The faults, and the replica that none befalls: a refit that loses all replicas fails by design."""

    faults: tuple[Fault, ...]
    spared: int

    def of(self, replica: int) -> Iterator[Fault]:
        """One replica's, one after another; those of different replicas happen at any time."""
        return (fault for fault in self.faults if fault.replica == replica)


def drawn(kinds: Mapping[str, Kind], faults: int, replicas: int, longest_delay_s: float, seed: int) -> Plan:
    """A plan. Every kind comes before any comes more often than its share.

    Raises:
        ValueError: there is only one replica, and it must not be struck.
    """
    if replicas < 2:
        raise ValueError(f"{replicas} replica: it takes 2, as one is always left alone")
    draw = Random(f"plan {seed}")
    spared = draw.randrange(replicas)
    struck = [number for number in range(replicas) if number != spared]
    deck, turns, made = [], [], []
    for number in range(faults):
        deck = deck or _shuffled([name for name, kind in kinds.items() for _ in range(kind.share)], draw)
        turns = turns or _shuffled(struck, draw)
        delay, kind = draw.uniform(0, longest_delay_s), deck.pop()
        victim = SCHEDULER if kinds[kind].at_scheduler else turns.pop()
        made.append(Fault(number, kind, victim, delay, draw.randrange(2**32)))
    return Plan(tuple(made), spared)


def _shuffled(items: list, draw: Random) -> list:
    draw.shuffle(items := list(items))
    return items
