"""How long a decision takes, and how much memory all that is known takes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from nemo_war.metadata import TurnMetadata
from nemo_war.routing.facts import Outcome, ReplicaFacts, TurnFacts
from nemo_war.routing.scheduler import Scheduler
from nemo_war.routing.workload_aware import WorkloadAware
from tools.routing_bench.bench import Bench
from tools.routing_bench.scenarios import STEP_TIME

LIVE, CONTEXT, NEW, DECISIONS = 10_000, 100_000, 2_000, 2_000
"""Trajectories, their tokens, what a turn adds to them, and how many decisions are timed."""
COMMON = 2_000
"""Tokens that all trajectories begin with."""


def decision(bench: Bench) -> dict[int, dict[str, float]]:
    """Figures by the number of replicas."""
    result = {}
    for replicas in (64, 1024):
        result[replicas] = _decide(replicas)
        bench.note("decision", replicas=replicas, **result[replicas])
    return result


def _decide(replicas: int) -> dict[str, float]:
    """Time of a decision among many live trajectories, hashing of the new tokens included."""
    random = np.random.default_rng(0)
    scheduler = Scheduler(WorkloadAware())
    facts = [ReplicaFacts(number, True, 0, STEP_TIME) for number in range(replicas)]
    common = random.integers(0, 30_000, COMMON, dtype=np.int32)

    def place(number: int, count: int, length: int) -> float:
        turn = _turn(number, count, length, common)
        started = time.perf_counter()
        scheduler.submit(turn, 0.0)
        (placement,) = scheduler.decide(facts, 0.0)
        seconds = time.perf_counter() - started
        scheduler.finish(placement.ticket, Outcome(200, None), 0.0)
        return seconds

    before = _resident_mib()
    for number in range(LIVE):
        place(number, 0, CONTEXT)
    memory = _resident_mib() - before
    took = [place(number, 1, CONTEXT + NEW) for number in random.permutation(LIVE)[:DECISIONS].tolist()]
    p50, p99 = 1e6 * np.quantile(took, (0.5, 0.99))
    return {"p50_us": round(float(p50), 1), "p99_us": round(float(p99), 1), "mib": round(memory)}


def _turn(number: int, count: int, length: int, common: np.ndarray) -> TurnFacts:
    rest = np.random.default_rng(number).integers(0, 30_000, length - len(common), dtype=np.int32)
    prompt = np.concatenate([common, rest])
    return TurnFacts(TurnMetadata(f"t{number}", f"g{number // 8}", count), len(prompt), 500, prompt)


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
