"""What a run was like, and how runs compare."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

OURS: Final = "war"


@dataclass(frozen=True, slots=True)
class Served:
    """A turn's course, in model seconds."""

    trajectory: str
    number: int
    replica: int
    waited_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """All that became of the sessions.

    Attributes:
        makespan: model seconds.
        turns: that were served.
        recomputed: tokens that a replica had computed before.
        failed: turns that were not served; their sessions ended there.
    """

    makespan: float
    turns: Sequence[Served]
    recomputed: int
    failed: int = 0


class Measured(NamedTuple):
    """A run in figures."""

    makespan: float
    hit_rate: float
    recomputed_tokens: int
    imbalance: float
    p99_turn_wait: float
    moves: int
    failed: int
    turns: int
    output_tokens: int


def measured(run: Run, replicas: int) -> Measured:
    """The figures of a run on so many replicas."""
    if not run.turns:  # a router that serves nothing must not end a run of hours
        return Measured(round(run.makespan, 1), 0.0, run.recomputed, 0.0, 0.0, 0, run.failed, 0, 0)
    output = output_tokens(run.turns, replicas)
    prompts = sum(turn.prompt_tokens for turn in run.turns)
    return Measured(
        round(run.makespan, 1),
        round(sum(turn.cached_tokens for turn in run.turns) / prompts, 3),
        run.recomputed,
        round(max(output) / statistics.mean(output), 3),
        round(float(np.quantile([turn.waited_s for turn in run.turns], 0.99)), 2),
        _moves(run.turns),
        run.failed,
        len(run.turns),
        sum(output),
    )


def output_tokens(turns: Sequence[Served], replicas: int) -> list[int]:
    """What each replica generated."""
    tokens = [0] * replicas
    for turn in turns:
        tokens[turn.replica] += turn.output_tokens
    return tokens


def _moves(turns: Sequence[Served]) -> int:
    last: dict[str, int] = {}
    moves = 0
    for turn in sorted(turns, key=lambda each: each.number):
        moves += last.get(turn.trajectory, turn.replica) != turn.replica
        last[turn.trajectory] = turn.replica
    return moves


def interval(values: Sequence[float]) -> list[float]:
    """[median, least, most]."""
    return [round(statistics.median(values), 3), round(min(values), 3), round(max(values), 3)]


def medians(runs: Sequence[Measured]) -> dict[str, float]:
    """The figures of several seeds."""
    return {
        name: round(float(statistics.median(getattr(run, name) for run in runs)), 3)
        for name in Measured._fields
    }


def compare(
    runs: Mapping[Any, Sequence[Measured]], bounds: Sequence[float], peers: Collection[str] = ()
) -> dict[str, list[float]]:
    """Ratios of our makespan to others', seed by seed."""
    makespans = {policy: [run.makespan for run in each] for policy, each in runs.items()}
    ours, best = makespans[OURS], [makespans[name] for name in makespans if name in peers]
    named = {
        "ratio_vs_best_peer": [min(others) for others in zip(*best, strict=True)],
        "ratio_vs_sticky": makespans["sticky"],
        "ratio_vs_round_robin": makespans["round_robin"],
        "ratio_vs_oracle": bounds,
    }
    return {
        name: interval([mine / other for mine, other in zip(ours, others, strict=True)])
        for name, others in named.items()
        if others
    }


def table(scenarios: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """A line for each policy in each scenario."""
    head = f"{'scenario':22} {'policy':26}" + "".join(f"{name:>18}" for name in Measured._fields)
    rows = [
        f"{scenario:22} {policy:26}" + "".join(f"{row[name]:18g}" for name in Measured._fields)
        for scenario, by_policy in scenarios.items()
        for policy, row in by_policy.items()
    ]
    return "\n".join([head, *rows])
