"""How well what is left of a trajectory is predicted before each of its turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from nemo_war.routing import policies
from nemo_war.routing.progress import Progress
from nemo_war.simulation.simulator import Result
from nemo_war.simulation.workload import Session
from tools.routing_bench.bench import Bench
from tools.routing_bench.in_process import roll_out
from tools.routing_bench.measurement import OURS, interval
from tools.routing_bench.scenarios import SCENARIOS

HIGH = 0.9
"""The quantile that is looked at."""


class _Prediction(NamedTuple):
    """Of output tokens, before a turn.

    Attributes:
        mean: expected.
        high: what suffices with the probability `HIGH`.
        left: what it was.
    """

    mean: float
    high: float
    left: int


def calibration(bench: Bench) -> dict[str, dict[str, list[float]]]:
    """By scenario: bias and error of the mean, error of a constant, and how often the quantile sufficed."""
    figures = {}
    for name in bench.scenarios:
        scenario = SCENARIOS[name]
        seeds = []
        for seed in range(bench.seeds):
            sessions = bench.workloads.of(scenario, seed)
            result = roll_out(scenario, sessions, policies.make(OURS, seed))
            seeds.append(_figures(list(_predictions(result, sessions))))
        figures[name] = {key: interval([each[key] for each in seeds]) for key in seeds[0]}
        bench.note("calibration", scenario=name, **figures[name])
    return figures


def _predictions(result: Result, sessions: Sequence[Session]) -> Iterator[_Prediction]:
    """What would have been predicted in the course of a run, in its order."""
    by_name = {session.name: session for session in sessions}
    events = [(turn.submitted_at, 1, turn) for turn in result.turns]
    events += [(turn.ended_at, 0, turn) for turn in result.turns]
    progress = Progress()
    for _, begins, turn in sorted(events, key=lambda event: event[:2]):
        session = by_name[turn.trajectory]
        if begins:
            progress.turn(session.name, session.group)
            yield _Prediction(
                progress.remaining(session.name, session.group).output_tokens,
                progress.quantile(session.name, session.group, HIGH).output_tokens,
                sum(len(each.output) for each in session.turns[turn.number :]),
            )
            continue
        progress.answered(session.name, turn.output_tokens)
        if turn.number + 1 == len(session.turns):
            progress.end(session.name)


def _figures(predictions: Sequence[_Prediction]) -> dict[str, float]:
    mean, high, left = np.array(predictions, dtype=np.float64).T
    return {
        "bias": float(mean.sum() / left.sum()),
        "error": float(np.abs(mean - left).mean() / left.mean()),
        "error_of_a_constant": float(np.abs(left.mean() - left).mean() / left.mean()),
        "within_high": float((left <= high).mean()),
    }
