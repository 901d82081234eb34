"""A replica that is killed in the middle of a run, and comes back empty."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemo_war.config import PolicyName
from nemo_war.routing import policies
from nemo_war.simulation.simulator import Outage
from nemo_war.simulation.workload import Session
from tools.routing_bench.bench import Bench
from tools.routing_bench.client import Agents
from tools.routing_bench.deployment import compared, deployed
from tools.routing_bench.in_process import simulate
from tools.routing_bench.measurement import OURS, interval
from tools.routing_bench.over_http import roll_out
from tools.routing_bench.scenarios import SCENARIOS, Scenario
from tools.routing_bench.services import Service

_SCENARIO = SCENARIOS["tau scarce 4"]
_POLICIES: tuple[PolicyName, ...] = (OURS, "sticky")
_PEERS = ("sglang cache_aware", "vllm consistent_hash")
_DIES, _RETURNS = 0.3, 0.6
"""Shares of the undisturbed makespan; over HTTP the replica is started then, and is back when it answers."""
_KILLED = 1


@dataclass(frozen=True, slots=True)
class Disturbed:
    """A run with an outage, in model seconds."""

    undisturbed: float
    makespan: float
    outage: float
    failed: int

    @property
    def ratio(self) -> float:
        """How much longer it took."""
        return self.makespan / self.undisturbed

    @property
    def scaled(self) -> float:
        """Of that, what the lost capacity does not explain: 1 for a run that was as busy as it could."""
        return self.ratio * (1 - self.outage / (_SCENARIO.replicas * self.makespan))


def killed(bench: Bench) -> dict[str, Any]:
    """Makespan to that of the undisturbed run, as it is and scaled by capacity; failed requests."""
    workloads = [bench.workloads.of(_SCENARIO, seed) for seed in range(bench.seeds)]
    simulated = {
        policy: _figures([_simulated(policy, seed, each) for seed, each in enumerate(workloads)])
        for policy in _POLICIES
    }
    return {"in_process": simulated, "http": asyncio.run(_over_http(bench, workloads))}


def _simulated(policy: PolicyName, seed: int, sessions: Sequence[Session]) -> Disturbed:
    before = simulate(_SCENARIO, sessions, policies.make(policy, seed)).makespan
    outage = Outage(_KILLED, _DIES * before, _RETURNS * before)
    after = simulate(_SCENARIO, sessions, policies.make(policy, seed), [outage])
    return Disturbed(before, after.makespan, outage.ends_at - outage.starts_at, after.failed)


async def _over_http(bench: Bench, workloads: Sequence[Sequence[Session]]) -> dict[str, Any]:
    result = {}
    for policy in compared(bench.peers, _POLICIES, _PEERS):
        runs = []
        for seed, sessions in enumerate(workloads):
            undisturbed = (await roll_out(bench, policy, _SCENARIO, sessions)).makespan
            run = await _disturbed(bench, policy, sessions, undisturbed)
            runs.append(run)
            bench.note("killed", seed=seed, policy=policy, **_figures([run]))
        result[policy] = _figures(runs)
    return result


async def _disturbed(bench: Bench, policy: str, sessions: Sequence[Session], undisturbed: float) -> Disturbed:
    async with deployed(policy, _SCENARIO, bench.peers, bench.folder) as deployment:
        agents = Agents(deployment.router.url, _SCENARIO.speed)
        outage = asyncio.create_task(_outage(deployment.mocks[_KILLED], _SCENARIO, undisturbed))
        makespan = await agents.roll_out(sessions)
        return Disturbed(undisturbed, makespan, await outage, agents.failed)


async def _outage(replica: Service, scenario: Scenario, undisturbed: float) -> float:
    """Kill the replica and bring it back; for how long it was away, in model seconds."""
    await asyncio.sleep(_DIES * undisturbed / scenario.speed)
    replica.kill()
    died = time.perf_counter()
    await asyncio.sleep((_RETURNS - _DIES) * undisturbed / scenario.speed)
    replica.start()
    await replica.ready()
    return (time.perf_counter() - died) * scenario.speed


def _figures(runs: Sequence[Disturbed]) -> dict[str, Any]:
    return {
        "ratio": interval([run.ratio for run in runs]),
        "ratio_scaled": interval([run.scaled for run in runs]),
        "outage_s": interval([run.outage for run in runs]),
        "failed": sum(run.failed for run in runs),
    }
