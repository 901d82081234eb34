"""Ours and the peers as processes, in front of the same mock replicas, on the same sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp

from nemo_war.config import PolicyName
from nemo_war.simulation.workload import Session
from tools.routing_bench.bench import Bench
from tools.routing_bench.client import Agents
from tools.routing_bench.deployment import PEERS, Deployment, compared, deployed
from tools.routing_bench.measurement import OURS, Measured, Run, compare, measured, medians
from tools.routing_bench.scenarios import SCENARIOS, Scenario, oracle

POLICIES: tuple[PolicyName, ...] = (OURS, "sticky", "round_robin")
"""Of our router; all of the peers' are compared with them."""


def http(bench: Bench) -> dict[str, Any]:
    """All scenarios asked for, under all routers."""
    return asyncio.run(_http(bench))


async def _http(bench: Bench) -> dict[str, Any]:
    result: dict[str, Any] = {"scenarios": {}, "ratios": {}}
    names = compared(bench.peers, POLICIES)
    for name in bench.http:
        scenario = SCENARIOS[name]
        runs: dict[str, list[Measured]] = {policy: [] for policy in names}
        bounds = []
        for seed in range(bench.seeds):
            sessions = bench.workloads.of(scenario, seed)
            bounds.append(oracle(scenario, sessions))
            for policy in _rotated(names, seed):
                run = measured(await roll_out(bench, policy, scenario, sessions), scenario.replicas)
                runs[policy].append(run)
                bench.note("http", scenario=name, seed=seed, policy=policy, **run._asdict())
        result["scenarios"][name] = {policy: medians(each) for policy, each in runs.items()}
        result["ratios"][name] = compare(runs, bounds, PEERS)
    return result


async def roll_out(bench: Bench, policy: str, scenario: Scenario, sessions: Sequence[Session]) -> Run:
    """The sessions at processes of their own."""
    async with deployed(policy, scenario, bench.peers, bench.folder) as deployment:
        return await serve(deployment, scenario, sessions)


async def serve(deployment: Deployment, scenario: Scenario, sessions: Sequence[Session]) -> Run:
    """The sessions at processes that are there."""
    agents = Agents(deployment.router.url, scenario.speed)
    makespan = await agents.roll_out(sessions, scenario.concurrency)
    return Run(makespan, agents.turns, await _recomputed(deployment), agents.failed)


async def _recomputed(deployment: Deployment) -> int:
    total = 0
    async with aiohttp.ClientSession() as client:
        for mock in deployment.mocks:
            async with client.get(f"{mock.url}/state") as response:
                total += (await response.json())["recomputed_tokens"]
    return total


def _rotated(names: Sequence[str], seed: int) -> Sequence[str]:
    """Who is first changes, as the machine may be faster at one time than at another."""
    first = seed % len(names)
    return [*names[first:], *names[:first]]
