"""A session whose replica dies: its next request at stock sticky routers and at ours.

The replicas are simulated ones behind HTTP, as the router stands between and no engine matters.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp

from nemo_war.simulation.server import MODEL
from tools.routing_bench.deployment import compared, deployed
from tools.routing_bench.scenarios import Scenario

_SCENARIO = Scenario("none", sessions=1, replicas=2, kv_tokens=60_000)
_OURS = ("war", "sticky")
_STICKY_PEERS = ("vllm consistent_hash", "vllm sticky_least_loaded", "sglang min_load")
_SESSION = "session-1"
_TURNS_BEFORE = 3
_LATER_S = 5.0
"""By then the routers' health checks, once a second, must have seen it."""
_PATIENCE_S = 60.0

Reply = dict[str, Any]


async def dead_replica(folder: Path, peers: Path | None) -> dict[str, Any]:
    """By router, what it says to a session before its replica is killed, at once after, and later."""
    if peers is None:
        print("the peers' routers are left out: --peers names no folder", flush=True)
    result = {}
    for policy in compared(peers, _OURS, _STICKY_PEERS):
        if peers is not None and policy in _STICKY_PEERS and not _is_there(peers, policy):
            print(f"{policy} is left out: its program is not in {peers}", flush=True)
            continue
        name = f"ours {policy}" if policy in _OURS else policy
        try:
            result[name] = await _kill(policy, folder, peers)
        except TimeoutError:
            result[name] = {"error": "the router did not start"}
        print(f"{name}: {result[name]}", flush=True)
    return result


def _is_there(peers: Path, policy: str) -> bool:
    return (peers / f"{policy.split()[0]}-router").exists()


async def _kill(policy: str, folder: Path, peers: Path | None) -> dict[str, Any]:
    async with deployed(policy, _SCENARIO, peers, folder) as deployment, aiohttp.ClientSession() as client:
        url = f"{deployment.router.url}/v1/chat/completions"
        before = [await _post(client, url, turn) for turn in range(_TURNS_BEFORE)]
        homes = {reply["replica"] for reply in before}
        if len(homes) != 1 or None in homes:
            return {"before": before, "error": "the session was not pinned to one replica"}
        deployment.mocks[homes.pop()].kill()
        at_once = await _post(client, url, _TURNS_BEFORE)
        await asyncio.sleep(_LATER_S)
        later = await _post(client, url, _TURNS_BEFORE + 1)
    return {"before": before[-1], "at_once": at_once, "later": later}


async def _post(client: aiohttp.ClientSession, url: str, turn: int) -> Reply:
    """One request of the session, which gets longer with each."""
    messages = [{"role": "user", "content": f"turn {number} " * 20} for number in range(turn + 1)]
    body = {"model": MODEL, "messages": messages, "max_tokens": 8}
    headers = {"x-session-id": _SESSION, "x-smg-routing-key": _SESSION}
    started = time.perf_counter()
    try:
        async with asyncio.timeout(_PATIENCE_S), client.post(url, json=body, headers=headers) as response:
            await response.read()
            status, replica = response.status, response.headers.get("x-replica")
    except (aiohttp.ClientError, TimeoutError) as error:
        return {"status": type(error).__name__, "replica": None, "seconds": _since(started)}
    return {
        "status": status,
        "replica": None if replica is None else int(replica),
        "seconds": _since(started),
    }


def _since(started: float) -> float:
    return round(time.perf_counter() - started, 2)
