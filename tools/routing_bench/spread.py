"""Work that a policy fond of its caches may leave to one replica: siblings, requests one after another."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nemo_war.routing import policies
from nemo_war.simulation.hashing import invent
from nemo_war.simulation.workload import Session, SessionTurn
from tools.routing_bench.bench import Bench
from tools.routing_bench.deployment import compared
from tools.routing_bench.in_process import simulate
from tools.routing_bench.measurement import Served, interval, output_tokens
from tools.routing_bench.over_http import POLICIES, roll_out
from tools.routing_bench.scenarios import Scenario

REPLICAS = 4
_SIBLINGS = Scenario("tau", 64, REPLICAS, 1_000_000, speed=5)
_SEQUENCE = Scenario("made up", 200, REPLICAS, 1_000_000, speed=5, concurrency=1)
_PROMPT, _OUTPUT = 200, 8  # tokens of a short request

Count = Callable[[Sequence[Served]], list[int]]


def siblings(bench: Bench) -> dict[str, Any]:
    """One group begins at once, with its first turn: output tokens of each replica."""

    def count(turns: Sequence[Served]) -> list[int]:
        return output_tokens(turns, REPLICAS)

    return _spread(bench, "siblings", _SIBLINGS, _group, count)


def one_after_another(bench: Bench) -> dict[str, Any]:
    """Short requests that have nothing in common, each when the last one is answered: requests of each."""
    return _spread(bench, "one_after_another", _SEQUENCE, _strangers, _requests)


def _spread(
    bench: Bench, part: str, scenario: Scenario, sessions: Callable[[Bench, int], list[Session]], count: Count
) -> dict[str, Any]:
    """Counts by seed, how many replicas had nothing at worst, and how uneven it was."""
    workloads = [sessions(bench, seed) for seed in range(bench.seeds)]
    simulated = {
        policy: _figures(
            [
                count(simulate(scenario, each, policies.make(policy, seed)).turns)
                for seed, each in enumerate(workloads)
            ]
        )
        for policy in POLICIES
    }
    return {
        "in_process": simulated,
        "http": asyncio.run(_over_http(bench, part, scenario, workloads, count)),
    }


async def _over_http(
    bench: Bench, part: str, scenario: Scenario, workloads: Sequence[Sequence[Session]], count: Count
) -> dict[str, Any]:
    result = {}
    for policy in compared(bench.peers, POLICIES):
        counts = []
        for seed, each in enumerate(workloads):
            run = await roll_out(bench, policy, scenario, each)
            counts.append(count(run.turns))
            bench.note(part, seed=seed, policy=policy, replicas=counts[-1], failed=run.failed)
        result[policy] = _figures(counts)
    return result


def _figures(counts: Sequence[Sequence[int]]) -> dict[str, Any]:
    return {
        "replicas": counts,
        "idle_replicas": max(sum(not each for each in count) for count in counts),
        "max_over_mean": interval([max(count) * len(count) / max(1, sum(count)) for count in counts]),
    }


def _group(bench: Bench, seed: int) -> list[Session]:
    """The same task for all; how long each answers is what others answered."""
    recorded = bench.workloads.tau(_SIBLINGS.sessions, seed)
    prompt = recorded[0].turns[0].prompt
    return [
        Session(f"sibling-{number}", "siblings", (SessionTurn(prompt, each.turns[0].output),))
        for number, each in enumerate(recorded)
    ]


def _strangers(bench: Bench, seed: int) -> list[Session]:
    output = np.zeros(_OUTPUT, np.int32)  # its length is all that matters
    return [
        Session(
            f"stranger-{number}",
            f"stranger-{number}",
            (SessionTurn(invent(seed * _SEQUENCE.sessions + number, np.arange(_PROMPT)), output),),
        )
        for number in range(_SEQUENCE.sessions)
    ]


def _requests(turns: Sequence[Served]) -> list[int]:
    counts = Counter(turn.replica for turn in turns)
    return [counts[replica] for replica in range(REPLICAS)]
