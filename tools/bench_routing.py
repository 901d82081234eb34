"""Where turns go, and what that costs: ours against two routers of the field, on identical traces.

Over HTTP each router stands in front of the same mock replicas (`nemo_war.simulation.server`), as a
process of its own, and serves the same sessions: 280 of tau-bench with seeded tool delays, and a seeded
subset of kv-cache-tester. In process the same scheduler drives the same simulated replicas without HTTP,
for ablations.

The last line is JSON. `in_process` and `http` have `scenarios`: {scenario: {policy: {makespan, hit_rate,
recomputed_tokens, imbalance, p99_turn_wait, moves, failed}}}, medians over the seeds (seconds, shares,
tokens), and `ratios`: {scenario: {ratio_vs_best_peer, ratio_vs_sticky, ratio_vs_round_robin,
ratio_vs_oracle}}, each [median, least, most] of our makespan to theirs, below 1 is better; best peer over
HTTP only. `in_process.ablation`: {scenario: {what: ratio of the makespan without it to ours}}. `decision`:
{replicas: {p50_us, p99_us, mib}}.

Example: python tools/bench_routing.py TRACES --tokenizer FOLDER --peers VENV/bin --seeds 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from nemo_war.config import StepTimePrior
from nemo_war.generation.step_time import StepLoad, StepTimeModel
from nemo_war.routing import policies
from nemo_war.routing.cost import Weights
from nemo_war.routing.policy import Policy
from nemo_war.routing.workload_aware import Options, WorkloadAware
from nemo_war.simulation.replica import ReplicaConfig
from nemo_war.simulation.simulator import Simulator
from nemo_war.simulation.workload import Session, ToolDelays, from_recorded, read_coding_sessions, sample
from nemo_war.speculative.workload import read_trace

PRIOR = StepTimePrior(base=20, per_request=0.1, per_token=0.12, per_kilotoken=0.05)
STEP_TIME = StepTimeModel(PRIOR)
BLOCK, RUNNING, BATCHED = 16, 64, 2048
SPEED = 5.0
"""Model seconds in a second of the HTTP runs: two cores serve all of it."""
OURS = "war"
PEERS = {
    "sglang cache_aware": ["sglang-router", "launch", "--policy", "cache_aware", "--cache-threshold", "0.3",
                           "--balance-abs-threshold", "4", "--balance-rel-threshold", "1.1"],
    "sglang min_load": ["sglang-router", "launch", "--policy", "manual", "--assignment-mode", "min_load"],
    "vllm consistent_hash": ["vllm-router", "--policy", "consistent_hash"],
    "vllm sticky_least_loaded": ["vllm-router", "--policy", "sticky_least_loaded"],
    "vllm programs": ["vllm-router", "--policy", "sticky_least_loaded", "--enable-program-scheduling"],
}  # fmt: skip
ABLATIONS = {
    "without prefill": Options(weights=Weights(prefill=0)),
    "without queue": Options(weights=Weights(queue=0)),
    "without pace": Options(weights=Weights(pace=0)),
    "without others": Options(weights=Weights(others=0)),
    "without evicted": Options(weights=Weights(evicted=0)),
    "without admission": Options(admission=False),
    "without progress": Options(progress=False),
    "shortest first": Options(order="shortest"),
    "in order of arrival": Options(order="arrival"),
}


def step_flags(speed: float) -> list[str]:
    """The step-time model, on a clock that is so much faster."""
    times = {
        "base": PRIOR.base, "per-request": PRIOR.per_request,
        "per-token": PRIOR.per_token, "per-kilotoken": PRIOR.per_kilotoken,
    }  # fmt: skip
    return [text for name, ms in times.items() for text in (f"--{name}-ms", str(ms / speed))]


class Scenario(NamedTuple):
    """What is rolled out, on what."""

    trace: str
    sessions: int
    replicas: int
    kv_tokens: int


SCENARIOS = {
    "tau ample 4": Scenario("tau", 280, 4, 1_000_000),
    "tau scarce 4": Scenario("tau", 280, 4, 60_000),
    "tau scarcer 4": Scenario("tau", 280, 4, 30_000),
    "tau low ample 4": Scenario("tau", 24, 4, 1_000_000),
    "tau scarce 8": Scenario("tau", 560, 8, 60_000),
    "coding ample 4": Scenario("coding", 64, 4, 4_000_000),
    "coding scarce 4": Scenario("coding", 64, 4, 300_000),
}


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


class Measured(NamedTuple):
    """One run."""

    makespan: float
    hit_rate: float
    recomputed_tokens: int
    imbalance: float
    p99_turn_wait: float
    moves: int
    failed: int


def measured(
    makespan: float, turns: Sequence[Served], replicas: int, recomputed: int, failed: int
) -> Measured:
    last: dict[str, int] = {}
    output = np.zeros(replicas)
    moves = 0
    for turn in sorted(turns, key=lambda each: each.number):
        moves += last.get(turn.trajectory, turn.replica) != turn.replica
        last[turn.trajectory] = turn.replica
        output[turn.replica] += turn.output_tokens
    prompts = sum(turn.prompt_tokens for turn in turns)
    return Measured(
        round(makespan, 1),
        round(sum(turn.cached_tokens for turn in turns) / prompts, 3),
        recomputed,
        round(float(output.max() / output.mean()), 3),
        round(float(np.quantile([turn.waited_s for turn in turns], 0.99)), 2),
        moves,
        failed,
    )


class Workloads:
    """Sessions of the traces, read once."""

    def __init__(self, traces: Path, tokenizer: Path) -> None:
        from nemo_war.generation.embedded.encoder import encoder

        self._traces = traces
        self._recorded = read_trace(traces / "tau_bench_airline.json", encoder(tokenizer))

    def of(self, scenario: Scenario, seed: int) -> list[Session]:
        if scenario.trace == "tau":
            return sample(from_recorded(self._recorded, ToolDelays(), seed), scenario.sessions, seed)
        return read_coding_sessions(self._traces / "kv_cache_tester", scenario.sessions, seed)


def config(scenario: Scenario) -> ReplicaConfig:
    return ReplicaConfig(scenario.kv_tokens // BLOCK, BLOCK, RUNNING, BATCHED, STEP_TIME)


def in_process(scenario: Scenario, sessions: list[Session], policy: Policy) -> Measured:
    result = Simulator(sessions, [config(scenario)] * scenario.replicas, policy).run()
    turns = [
        Served(
            turn.trajectory, turn.number, turn.replica, turn.first_token_at - turn.submitted_at,
            turn.prompt_tokens, turn.cached_tokens, turn.output_tokens,
        )
        for turn in result.turns
    ]  # fmt: skip
    return measured(result.makespan_s, turns, scenario.replicas, result.recomputed_tokens, 0)


def oracle(scenario: Scenario, sessions: list[Session]) -> float:
    """What hardly a schedule beats: the longest trajectory alone, or all work spread in full batches."""
    alone, work = [], 0.0
    for session in sessions:
        seconds = 0.0
        for turn in session.turns:
            prefill = STEP_TIME.predict(StepLoad(1, len(turn.prompt))) / 1e3
            seconds += prefill + len(turn.output) * STEP_TIME.predict(StepLoad(1, 1)) / 1e3 + turn.delay_s
            token_s = (PRIOR.base / RUNNING + PRIOR.per_request + PRIOR.per_token) / 1e3
            work += len(turn.output) * token_s
        alone.append(seconds)
    return max(max(alone), work / scenario.replicas)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def processes(commands: list[list[str]], urls: list[str], folder: Path):  # type: ignore[no-untyped-def]
    """Start, wait until each URL answers, and leave nothing behind."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path[1:1]])
    }
    log = (folder / "processes.log").open("ab")
    started = [subprocess.Popen(each, stdout=log, stderr=log, env=environment) for each in commands]
    try:
        async with aiohttp.ClientSession() as client:
            for url in urls:
                await _answers(client, url)
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        log.close()


async def _answers(client: aiohttp.ClientSession, url: str) -> None:
    for _ in range(300):
        try:
            async with client.get(url) as response:
                if response.status < 500:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} does not answer")


def mock(port: int, number: int, scenario: Scenario) -> list[str]:
    return [
        sys.executable, "-m", "nemo_war.simulation.server", "--port", str(port), "--number", str(number),
        "--kv-tokens", str(scenario.kv_tokens), "--block-size", str(BLOCK), "--max-running", str(RUNNING),
        "--max-batched-tokens", str(BATCHED), "--speed", str(SPEED), *step_flags(1),
    ]  # fmt: skip


def router(policy: str, port: int, workers: list[str], peers: Path | None, kv_tokens: int) -> list[str]:
    if policy in PEERS:
        assert peers is not None
        name, *options = PEERS[policy]
        command = [str(peers / name), *options, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--worker-urls", *workers]
        extra = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        return command + extra + ["--worker-startup-check-interval", "1"]
    replicas = [flag for url in workers for flag in ("--replica", url)]
    command = [sys.executable, "-m", "nemo_war.cli", "route", *replicas, "--port", str(port)]
    return [*command, "--policy", policy, "--kv-tokens", str(kv_tokens), *step_flags(SPEED)]


async def over_http(
    policy: str, scenario: Scenario, sessions: list[Session], peers: Path | None, folder: Path
) -> Measured:
    ports = [free_port() for _ in range(scenario.replicas + 1)]
    workers = [f"http://127.0.0.1:{port}" for port in ports[1:]]
    mocks = [mock(port, number, scenario) for number, port in enumerate(ports[1:])]
    async with processes(mocks, [f"{url}/health" for url in workers], folder):
        entry = f"http://127.0.0.1:{ports[0]}"
        command = router(policy, ports[0], workers, peers, scenario.kv_tokens)
        async with processes([command], [f"{entry}/v1/models"], folder):
            makespan, turns, failed = await roll_out(entry, sessions)
            recomputed = await _recomputed(workers)
    return measured(makespan, turns, scenario.replicas, recomputed, failed)


async def _recomputed(workers: list[str]) -> int:
    total = 0
    async with aiohttp.ClientSession() as client:
        for url in workers:
            async with client.get(f"{url}/state") as response:
                total += (await response.json())["recomputed_tokens"]
    return total


async def roll_out(entry: str, sessions: list[Session]) -> tuple[float, list[Served], int]:
    turns: list[Served] = []
    failed = 0
    started = time.perf_counter()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(3600)) as client:

        async def one(session: Session) -> None:
            nonlocal failed
            messages: list[dict[str, str]] = []
            name = session.name.replace("/", "-").replace("#", "-")
            headers = dict.fromkeys(("x-session-id", "x-smg-routing-key"), name)
            headers["x-nemo-war-group"] = session.group
            for number, turn in enumerate(session.turns):
                messages = [] if turn.reset else messages
                messages.append({"role": "user", "content": " ".join(map(str, turn.prompt.tolist()))})
                body = {
                    "model": "mock", "messages": messages, "max_tokens": len(turn.output),
                    "vllm_xargs": {"agentic_context": json.dumps({"program_id": name})},
                }  # fmt: skip
                asked = time.perf_counter()
                async with client.post(
                    f"{entry}/v1/chat/completions", json=body, headers=headers
                ) as response:
                    if response.status != 200:
                        failed += 1
                        return
                    answer = await response.json()
                    replica = int(response.headers["x-replica"])
                usage = answer["usage"]
                ideal = len(turn.output) * STEP_TIME.predict(StepLoad(1, 1)) / 1e3
                waited = (time.perf_counter() - asked) * SPEED - ideal
                turns.append(
                    Served(
                        session.name, number, replica, max(0.0, waited), usage["prompt_tokens"],
                        usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"],
                    )
                )  # fmt: skip
                messages.append(answer["choices"][0]["message"])
                await asyncio.sleep(turn.delay_s / SPEED)

        await asyncio.gather(*map(one, sessions))
    return (time.perf_counter() - started) * SPEED, turns, failed


def spread(values: Sequence[float]) -> list[float]:
    """[median, least, most]."""
    return [round(statistics.median(values), 3), round(min(values), 3), round(max(values), 3)]


def medians(runs: Sequence[Measured]) -> dict[str, float]:
    return {
        name: round(float(statistics.median(getattr(run, name) for run in runs)), 3)
        for name in Measured._fields
    }


def compare(makespans: dict[str, list[float]], bounds: list[float]) -> dict[str, list[float]]:
    """Ratios of our makespan to others', seed by seed."""
    ours = makespans[OURS]
    peers = [name for name in makespans if name in PEERS]
    best = [min(makespans[name][i] for name in peers) for i in range(len(ours))] if peers else []
    named = {
        "ratio_vs_best_peer": best,
        "ratio_vs_sticky": makespans.get("sticky", []),
        "ratio_vs_round_robin": makespans.get("round_robin", []),
        "ratio_vs_oracle": bounds,
    }
    return {
        name: spread([mine / other for mine, other in zip(ours, others, strict=True)])
        for name, others in named.items()
        if others
    }


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def decide_once(replicas: int, live: int, tokens: int, new: int, decisions: int) -> dict[str, float]:
    """Time of a decision among so many live trajectories, hashing of the new tokens included."""
    from nemo_war.metadata import TurnMetadata
    from nemo_war.routing.facts import Outcome, ReplicaFacts, TurnFacts
    from nemo_war.routing.scheduler import Scheduler

    random = np.random.default_rng(0)
    scheduler = Scheduler(WorkloadAware())
    facts = [ReplicaFacts(number, True, 0, STEP_TIME) for number in range(replicas)]
    before = resident_mib()
    common = random.integers(0, 30_000, 2_000, dtype=np.int32)

    def turn(number: int, count: int, length: int) -> TurnFacts:
        rest = np.random.default_rng(number).integers(0, 30_000, length - len(common), dtype=np.int32)
        prompt = np.concatenate([common, rest])
        return TurnFacts(TurnMetadata(f"t{number}", f"g{number // 8}", count), len(prompt), 500, prompt)

    def place(facts_of: TurnFacts) -> float:
        started = time.perf_counter()
        scheduler.submit(facts_of, 0.0)
        (placement,) = scheduler.decide(facts, 0.0)
        seconds = time.perf_counter() - started
        scheduler.finish(placement.ticket, Outcome(200, None), 0.0)
        return seconds

    for number in range(live):
        place(turn(number, 0, tokens))
    memory = resident_mib() - before
    order = random.permutation(live)[:decisions].tolist()
    took = [place(turn(number, 1, tokens + new)) for number in order]
    return {
        "p50_us": round(1e6 * float(np.quantile(took, 0.5)), 1),
        "p99_us": round(1e6 * float(np.quantile(took, 0.99)), 1),
        "mib": round(memory),
    }


def table(scenarios: dict[str, dict[str, dict[str, float]]]) -> str:
    head = f"{'scenario':18} {'policy':26}" + "".join(f"{name:>18}" for name in Measured._fields)
    rows = [
        f"{scenario:18} {policy:26}" + "".join(f"{row[name]:18g}" for name in Measured._fields)
        for scenario, by_policy in scenarios.items()
        for policy, row in by_policy.items()
    ]
    return "\n".join([head, *rows])


def simulated(workloads: Workloads, names: Sequence[str], seeds: int) -> dict[str, Any]:
    """Ours and the policies to compare with, in process; and what each of our parts is worth."""
    result: dict[str, Any] = {"scenarios": {}, "ratios": {}, "ablation": {}}
    for name in names:
        scenario = SCENARIOS[name]
        sessions = [workloads.of(scenario, seed) for seed in range(seeds)]
        bounds = [oracle(scenario, each) for each in sessions]
        runs = {
            policy: [
                in_process(scenario, each, policies.make(policy, seed)) for seed, each in enumerate(sessions)
            ]
            for policy in (OURS, "sticky", "least_outstanding", "consistent_hash", "published", "round_robin")
        }  # fmt: skip
        makespans = {policy: [run.makespan for run in each] for policy, each in runs.items()}
        result["scenarios"][name] = {policy: medians(each) for policy, each in runs.items()}
        result["ratios"][name] = compare(makespans, bounds)
        result["ablation"][name] = {
            what: round(
                statistics.median(
                    in_process(scenario, each, WorkloadAware(options, seed)).makespan / makespans[OURS][seed]
                    for seed, each in enumerate(sessions)
                ),
                3,
            )
            for what, options in ABLATIONS.items()
        }
        print(f"in process: {name} done", flush=True)
    return result


async def served(
    workloads: Workloads, names: Sequence[str], seeds: int, peers: Path | None, folder: Path
) -> dict[str, Any]:
    """Ours and the peers as processes."""
    compared = [OURS, "sticky", "round_robin", *(PEERS if peers else ())]
    result: dict[str, Any] = {"scenarios": {}, "ratios": {}}
    for name in names:
        scenario = SCENARIOS[name]
        runs: dict[str, list[Measured]] = {policy: [] for policy in compared}
        bounds = []
        for seed in range(seeds):
            sessions = workloads.of(scenario, seed)
            bounds.append(oracle(scenario, sessions))
            for policy in compared[seed % len(compared) :] + compared[: seed % len(compared)]:
                runs[policy].append(await over_http(policy, scenario, sessions, peers, folder))
                print(f"{name}, seed {seed}, {policy}: {runs[policy][-1]}", flush=True)
        result["scenarios"][name] = {policy: medians(each) for policy, each in runs.items()}
        makespans = {policy: [run.makespan for run in each] for policy, each in runs.items()}
        result["ratios"][name] = compare(makespans, bounds)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, help="folder with tau_bench_airline.json and kv_cache_tester/")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a Hugging Face tokenizer")
    parser.add_argument("--peers", type=Path, help="folder with sglang-router and vllm-router")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--http", nargs="*", choices=list(SCENARIOS), default=["tau ample 4", "tau scarce 4"])
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_routing"), help="for logs")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    workloads = Workloads(arguments.traces, arguments.tokenizer)
    result: dict[str, Any] = {"in_process": simulated(workloads, arguments.scenarios, arguments.seeds)}
    print(table(result["in_process"]["scenarios"]))
    result["decision"] = {n: decide_once(n, 10_000, 100_000, 2_000, 2_000) for n in (64, 1024)}
    if arguments.http:
        coroutine = served(workloads, arguments.http, arguments.seeds, arguments.peers, arguments.folder)
        result["http"] = asyncio.run(coroutine)
        print(table(result["http"]["scenarios"]))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
