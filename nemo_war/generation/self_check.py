"""Do all replicas of a policy epoch say the same, and is what they say computed on KV of their own?

Each is given one prompt that never changes, twice: as turns are, so that KV that was left
over is found, and under a salt that nothing else has. Weights that differ show between
replicas, stale KV between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_LIKELIEST = 5
"""Tokens of each side that the other one has to know; behind them the order is chance."""


class Probe(NamedTuple):
    """What one replica said: the likeliest next tokens and their logprobs, in nats."""

    cached: Mapping[int, float]
    alone: Mapping[int, float]


def deviants(probes: Mapping[int, Probe], tolerance: float) -> dict[int, str]:
    """The replicas that must not serve, and why: what each did, to go on from "replica 3".

    Args:
        probes: by replica.
        tolerance: largest difference of logprobs, in nats, that is taken for rounding.

    Returns:
        Empty where all agree. Where no two thirds of the replicas do, nobody knows which
        are right, and it is all of them.
    """
    found = {
        number: f"has stale KV: its logprobs differ by {gap:.3g} from those without cache"
        for number, probe in probes.items()
        if (gap := distance(probe.cached, probe.alone)) > tolerance
    }
    sound = {number: probe.alone for number, probe in probes.items() if number not in found}
    agreeing = {
        number: {other for other, theirs in sound.items() if distance(mine, theirs) <= tolerance}
        for number, mine in sound.items()
    }
    largest = max(agreeing.values(), key=len, default=set())
    right = largest if 3 * len(largest) >= 2 * len(sound) else set()
    for number in sound.keys() - right:
        found[number] = "says something else than the other replicas of its policy epoch"
    return dict(sorted(found.items()))


def distance(some: Mapping[int, float], others: Mapping[int, float]) -> float:
    """Largest difference of two replicas' logprobs; infinite where the likeliest tokens are others."""
    for mine, theirs in ((some, others), (others, some)):
        if not set(sorted(mine, key=mine.__getitem__, reverse=True)[:_LIKELIEST]) <= theirs.keys():
            return float("inf")
    return max((abs(some[token] - others[token]) for token in some.keys() & others.keys()), default=0.0)
