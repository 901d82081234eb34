"""What a router takes for itself: time added to a request, requests per second, CPU time.

The replicas answer at once. Client, router and replicas share the cores, so that CPU time per
request says more than requests per second.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from nemo_war.simulation.server import MODEL
from tools.routing_bench.bench import Bench
from tools.routing_bench.deployment import compared, router
from tools.routing_bench.measurement import OURS
from tools.routing_bench.services import Service, free_port, running

_REPLICAS = 4
_POLICIES, _PEERS = (OURS, "sticky"), ("sglang cache_aware", "vllm consistent_hash")
_DIRECT = "direct"
_SIZES = {"2 KB": 2_000, "200 KB": 200_000}
_CONCURRENCIES = (1, 32)
_TRAJECTORIES = 64
"""Distinct bodies, each a trajectory that asks again and again: what routers remember of them is bounded."""
_WARM_UP_S, _MEASURED_S = 0.5, 3.0


class Load(NamedTuple):
    """What was measured of one router."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float


def overhead(bench: Bench) -> dict[str, Any]:
    """Figures by body size and concurrency; `direct` is without a router."""
    return asyncio.run(_overhead(bench))


async def _overhead(bench: Bench) -> dict[str, Any]:
    runs: dict[str, dict[str, list[Load]]] = {}
    for round_number in range(bench.seeds):
        for policy in [_DIRECT, *compared(bench.peers, _POLICIES, _PEERS)]:
            for cell, load in (await _loads(bench, policy)).items():
                runs.setdefault(cell, {}).setdefault(policy, []).append(load)
                bench.note("overhead", seed=round_number, cell=cell, policy=policy, **load._asdict())
    return {
        cell: {policy: _figures(loads, by_policy[_DIRECT]) for policy, loads in by_policy.items()}
        for cell, by_policy in runs.items()
    }


async def _loads(bench: Bench, policy: str) -> dict[str, Load]:
    """All cells of one router."""
    log = bench.folder / "processes.log"
    ports = [free_port() for _ in range(_REPLICAS)]
    workers = [f"http://127.0.0.1:{port}" for port in ports]
    instant = [sys.executable, "-m", "tools.routing_bench.instant", *map(str, ports)]
    entry = Service(instant, workers[-1], "/health", log)
    async with running([entry]):
        if policy == _DIRECT:
            return {cell: await _load(entry, *values) for cell, values in _cells().items()}
        service = router(policy, workers, bench.peers, log)
        async with running([service]):
            return {cell: await _load(service, *values) for cell, values in _cells().items()}


def _cells() -> dict[str, tuple[int, int]]:
    return {
        f"{size} at {concurrency}": (_SIZES[size], concurrency)
        for size, concurrency in itertools.product(_SIZES, _CONCURRENCIES)
    }


async def _load(service: Service, size: int, concurrency: int) -> Load:
    bodies = [_body(number, size) for number in range(_TRAJECTORIES)]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client:
        await _ask(client, service.url, bodies, concurrency, _WARM_UP_S)
        cpu, started = service.cpu_s(), time.perf_counter()
        seconds = await _ask(client, service.url, bodies, concurrency, _MEASURED_S)
        elapsed, cpu = time.perf_counter() - started, service.cpu_s() - cpu
    p50, p99 = 1e3 * np.quantile(seconds, (0.5, 0.99))
    return Load(len(seconds) / elapsed, float(p50), float(p99), 1e3 * cpu / len(seconds))


async def _ask(
    client: aiohttp.ClientSession, entry: str, bodies: Sequence[bytes], concurrency: int, duration_s: float
) -> list[float]:
    """Ask for so long; how long each answer took."""
    seconds: list[float] = []
    turns = itertools.cycle(enumerate(bodies))
    until = time.perf_counter() + duration_s

    async def one() -> None:
        while (asked := time.perf_counter()) < until:
            number, body = next(turns)
            headers = {"Content-Type": "application/json", "x-session-id": f"trajectory-{number}"}
            async with client.post(f"{entry}/v1/chat/completions", data=body, headers=headers) as response:
                response.raise_for_status()
                await response.read()
            seconds.append(time.perf_counter() - asked)

    await asyncio.gather(*(one() for _ in range(concurrency)))
    return seconds


def _body(number: int, size: int) -> bytes:
    words = np.random.default_rng(number).integers(10_000, 100_000, size // 6)
    messages = [{"role": "user", "content": " ".join(map(str, words.tolist()))}]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1}).encode()


def _figures(loads: Sequence[Load], direct: Sequence[Load]) -> dict[str, float]:
    """Medians of the rounds."""
    mine, bare = (
        {name: statistics.median(getattr(load, name) for load in each) for name in Load._fields}
        for each in (loads, direct)
    )
    added = {f"added_{name}": mine[name] - bare[name] for name in ("p50_ms", "p99_ms")}
    return {name: round(value, 3) for name, value in (mine | added).items()}
