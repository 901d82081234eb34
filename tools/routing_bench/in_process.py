"""The scheduler on simulated replicas without HTTP: ours, what it is compared with, and what its parts do."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from nemo_war.config import PolicyName
from nemo_war.routing import policies
from nemo_war.routing.options import Options, Weights
from nemo_war.routing.policy import Policy
from nemo_war.routing.workload_aware import WorkloadAware
from nemo_war.simulation.simulator import Outage, Result, Simulator
from nemo_war.simulation.workload import Session
from tools.routing_bench.bench import Bench
from tools.routing_bench.measurement import OURS, Run, Served, compare, measured, medians
from tools.routing_bench.scenarios import SCENARIOS, Scenario, oracle

COMPARED: tuple[PolicyName, ...] = (
    OURS,
    "sticky",
    "least_outstanding",
    "consistent_hash",
    "published",
    "round_robin",
)
ABLATIONS = {
    "without prefill": Options(weights=Weights(prefill=0)),
    "without queue": Options(weights=Weights(queue=0)),
    "without pace": Options(weights=Weights(pace=0)),
    "without others": Options(weights=Weights(others=0)),
    "without admission": Options(admission=False),
    "without progress": Options(progress=False),
    "longest first": Options(order="longest"),
    "in order of arrival": Options(order="arrival"),
}


def simulate(
    scenario: Scenario, sessions: Sequence[Session], policy: Policy, outages: Sequence[Outage] = ()
) -> Run:
    """Roll the sessions out, as a run."""
    result = roll_out(scenario, sessions, policy, outages)
    turns = [
        Served(
            turn.trajectory, turn.number, turn.replica, turn.first_token_at - turn.submitted_at,
            turn.prompt_tokens, turn.cached_tokens, turn.output_tokens,
        )
        for turn in result.turns
    ]  # fmt: skip
    return Run(result.makespan_s, turns, result.recomputed_tokens)


def roll_out(
    scenario: Scenario, sessions: Sequence[Session], policy: Policy, outages: Sequence[Outage] = ()
) -> Result:
    """Roll the sessions out on the scenario's replicas."""
    configs = [scenario.replica] * scenario.replicas
    return Simulator(sessions, configs, policy, scenario.concurrency, outages).run()


def in_process(bench: Bench) -> dict[str, Any]:
    """All scenarios asked for, under all policies, and ours without each of its parts."""
    result: dict[str, Any] = {"scenarios": {}, "ratios": {}, "ablation": {}}
    for name in bench.scenarios:
        scenario = SCENARIOS[name]
        workloads = [bench.workloads.of(scenario, seed) for seed in range(bench.seeds)]
        runs = {
            policy: [
                measured(simulate(scenario, sessions, policies.make(policy, seed)), scenario.replicas)
                for seed, sessions in enumerate(workloads)
            ]
            for policy in COMPARED
        }
        result["scenarios"][name] = {policy: medians(each) for policy, each in runs.items()}
        result["ratios"][name] = compare(runs, [oracle(scenario, sessions) for sessions in workloads])
        ours = [run.makespan for run in runs[OURS]]
        result["ablation"][name] = {
            what: _ablated(scenario, workloads, options, ours) for what, options in ABLATIONS.items()
        }
        bench.note("in_process", scenario=name, **{key: each[name] for key, each in result.items()})
    return result


def _ablated(
    scenario: Scenario, workloads: Sequence[Sequence[Session]], options: Options, ours: Sequence[float]
) -> float:
    ratios = [
        simulate(scenario, sessions, WorkloadAware(options, seed)).makespan / ours[seed]
        for seed, sessions in enumerate(workloads)
    ]
    return round(statistics.median(ratios), 3)
