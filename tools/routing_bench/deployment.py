"""A router in front of mock replicas, all as processes: ours, or one of two of the field."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from nemo_war.routing.options import Options
from tools.routing_bench.scenarios import BATCHED, BLOCK, PRIOR, RUNNING, Scenario
from tools.routing_bench.services import Service, free_port, running

PEERS = {
    "sglang cache_aware": ["sglang-router", "launch", "--policy", "cache_aware", "--cache-threshold", "0.3",
                           "--balance-abs-threshold", "4", "--balance-rel-threshold", "1.1"],
    "sglang min_load": ["sglang-router", "launch", "--policy", "manual", "--assignment-mode", "min_load"],
    "vllm consistent_hash": ["vllm-router", "--policy", "consistent_hash"],
    "vllm sticky_least_loaded": ["vllm-router", "--policy", "sticky_least_loaded"],
    "vllm programs": ["vllm-router", "--policy", "sticky_least_loaded", "--enable-program-scheduling"],
}  # fmt: skip
_PEERS_HEALTH_S = 1
"""Time between two looks at a replica: 60 s unless told otherwise, and this is the least they take."""
_IDLE_S = 600
"""Model seconds after which ours takes a trajectory for over, its default."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """It answers at the router's URL."""

    router: Service
    mocks: Sequence[Service]


@asynccontextmanager
async def deployed(
    policy: str, scenario: Scenario, peers: Path | None, folder: Path
) -> AsyncIterator[Deployment]:
    """Start it; the folder gets the log."""
    log = folder / "processes.log"
    mocks = [_mock(number, scenario, log) for number in range(scenario.replicas)]
    async with running(mocks):
        workers = [mock.url for mock in mocks]
        flags = _war_flags(scenario)
        service = router(policy, workers, peers, log, flags)
        async with running([service]):
            yield Deployment(service, mocks)


def router(
    policy: str, workers: Sequence[str], peers: Path | None, log: Path, flags: Sequence[str] = ()
) -> Service:
    """The router of a policy; `flags` are for ours."""
    port = free_port()
    command = _peer(policy, port, workers, peers) if policy in PEERS else _ours(policy, port, workers, flags)
    return Service(command, f"http://127.0.0.1:{port}", "/v1/models", log)


def compared(peers: Path | None, of_ours: Sequence[str], of_peers: Sequence[str] = tuple(PEERS)) -> list[str]:
    """Names of all routers that are compared."""
    return [*of_ours, *(of_peers if peers else ())]


def _peer(policy: str, port: int, workers: Sequence[str], peers: Path | None) -> list[str]:
    assert peers is not None
    name, *options = PEERS[policy]
    return [
        str(peers / name), *options, "--host", "127.0.0.1", "--port", str(port),
        "--worker-urls", *workers, "--worker-startup-check-interval", "1", "--log-level", "error",
        "--health-check-interval-secs", str(_PEERS_HEALTH_S),
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()),
    ]  # fmt: skip


def _ours(policy: str, port: int, workers: Sequence[str], flags: Sequence[str]) -> list[str]:
    replicas = [flag for url in workers for flag in ("--replica", url)]
    command = [sys.executable, "-m", "nemo_war.cli", "route", *replicas, "--port", str(port)]
    return [*command, "--policy", policy, *flags]


def _war_flags(scenario: Scenario) -> list[str]:
    """What our router is told of the replicas, and its own times, on a clock that is so much slower."""
    speed = scenario.speed
    return [
        "--kv-tokens", str(scenario.kv_tokens), *_step_flags(speed),
        "--patience-s", str(Options().patience_s / speed), "--idle-s", str(_IDLE_S / speed),
        "--health-interval-s", str(2 / speed),
    ]  # fmt: skip


def _mock(number: int, scenario: Scenario, log: Path) -> Service:
    port = free_port()
    command = [
        sys.executable, "-m", "nemo_war.simulation.server", "--port", str(port), "--number", str(number),
        "--kv-tokens", str(scenario.kv_tokens), "--block-size", str(BLOCK), "--max-running", str(RUNNING),
        "--max-batched-tokens", str(BATCHED), "--speed", str(scenario.speed), *_step_flags(1),
    ]  # fmt: skip
    return Service(command, f"http://127.0.0.1:{port}", "/health", log)


def _step_flags(speed: float) -> list[str]:
    """The step-time model, on a clock that is so much faster."""
    times = {
        "base": PRIOR.base, "per-request": PRIOR.per_request,
        "per-token": PRIOR.per_token, "per-kilotoken": PRIOR.per_kilotoken,
    }  # fmt: skip
    return [text for name, ms in times.items() for text in (f"--{name}-ms", str(ms / speed))]
