"""Three failures of the field's usual parts, beside ours: stale KV, sleep, and a session's dead replica.

Freshness is judged by the first token's logprobs of a prompt that was cached under the old
weights, in nats from what an engine that was started with the new weights says.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from nemo_war.config import SpeculativeConfig, WarConfig
from nemo_war.generation.embedded.fleet import Fleet
from nemo_war.generation.embedded.replica import Replica
from nemo_war.generation.embedded.turn import Answer
from nemo_war.generation.embedded.weights import Weights, share_weights
from tests.engine.fleets import chat, fleet, sample
from tests.engine.policies import as_bytes, as_folder, perturbed
from tests.engine.test_freshness import DIFFERENT, EQUAL, distance, first_token_logprobs
from tools.refit_bench.outage import dead_replica

_WAR = WarConfig(speculative=SpeculativeConfig(max_draft_tokens=4))
_PERTURBATION = 0.08
"""Share of each matrix's spread: enough that the old policy is told from the new one."""
_LONG = 192
"""Tokens of the turn that is in flight: it must outlast a load of the weights."""
_BEGUN_S = 1.0

Logprobs = dict[int, float]


class StockReplica(Replica):
    """What a client of stock vLLM can do between two policies."""

    async def stock_reset(self) -> bool:
        """vLLM's own answer, asked as its HTTP endpoint asks when it is told nothing more."""
        return bool(await self._engine.reset_prefix_cache())

    async def sleep(self, level: int) -> None:
        await self._engine.sleep(level)

    async def wake_up(self, level: int) -> None:
        await self._engine.wake_up(["scheduling"] if level == 0 else None)

    async def sleep_mode(self) -> str:
        """What this build says to `enable_sleep_mode`; empty where it takes it."""
        from vllm.engine.arg_utils import AsyncEngineArgs

        try:
            AsyncEngineArgs(model=self._spec.model, enable_sleep_mode=True).create_engine_config()
        except Exception as error:
            return str(error)
        return ""

    async def said(self, text: str) -> list[str]:
        """Lines of this process's and its engine's output with this text."""
        files = {os.path.realpath(f"/proc/self/fd/{number}") for number in (1, 2)}
        lines = [line for file in files for line in Path(file).read_text(errors="replace").splitlines()]
        return [line[line.index(text) :] for line in lines if text in line]


async def stock(model: Path, folder: Path, peers: Path | None) -> dict[str, Any]:
    """All three."""
    caches = await _caches(model, folder)
    return caches | {"dead_replica": await dead_replica(folder, peers)}


async def _caches(model: Path, folder: Path) -> dict[str, Any]:
    prompts = [_prompt(model, topic) for topic in ("squares", "cubes")]
    old = share_weights((model / "model.safetensors").read_bytes())
    weights = perturbed(model, _PERTURBATION)
    new = share_weights(as_bytes(weights))
    async with fleet(as_folder(model, weights, folder / "new"), dtype="float32") as fresh:
        of_new = [await first_token_logprobs(fresh, prompt) for prompt in prompts]
    print("a fresh engine on the new weights has spoken", flush=True)
    async with fleet(model, dtype="float32", replica_class=StockReplica) as on:
        of_old = [await first_token_logprobs(on, prompt) for prompt in prompts]
        reset = await _stock_in_flight(on, prompts[0], new, of_new[0])
        sleep = await _stock_asleep(on, prompts[1], old, new, of_old[1], of_new[1])
    print(f"stock: {reset} {sleep}", flush=True)
    async with fleet(model, war=_WAR, in_flight="pause", dtype="float32") as on:
        ours_in_flight, ours_between = await _ours(on, prompts, old, new, of_old, of_new)
    return {
        "old_to_new": _nats(distance(of_old[0], of_new[0])),
        "equal_below": EQUAL,
        "different_above": DIFFERENT,
        "reset_in_flight": {"stock": reset, "ours": ours_in_flight},
        "sleep_wake": {"stock": sleep, "ours": ours_between},
    }


async def _stock_in_flight(on: Fleet, prompt: list[int], new: Weights, truth: Logprobs) -> dict[str, Any]:
    """New weights and a reset while a request runs; then the reset again when none does."""
    running = await _begin(on)
    await on.ask_one(0, "load_weights", new.reference)
    in_flight = not running.done()
    answered = await on.ask_one(0, "stock_reset")
    after = await first_token_logprobs(on, prompt)
    await running
    when_idle = await on.ask_one(0, "stock_reset")
    afterwards = await first_token_logprobs(on, prompt)
    return {
        "in_flight": int(in_flight),
        "reset_returned": answered,
        "log": (await on.ask_one(0, "said", "Failed to reset prefix cache"))[:1],
        "to_fresh": _nats(distance(after, truth)),
        "stale": distance(after, truth) > DIFFERENT,
        "reset_when_idle": when_idle,
        "to_fresh_when_idle": _nats(distance(afterwards, truth)),
    }


async def _stock_asleep(
    on: Fleet, prompt: list[int], old: Weights, new: Weights, of_old: Logprobs, of_new: Logprobs
) -> dict[str, Any]:
    """New weights while the engine sleeps, as far as this build can; and with no reset at all.

    The engine has the new weights when this begins.
    """
    result: dict[str, Any] = {"blocked": await on.ask_one(0, "sleep_mode") or None}
    ways: dict[str, Callable[[Weights], Awaitable[None]]] = {
        "level_1_without_the_mode": lambda weights: _while_asleep(on, 1, weights),
        "level_0": lambda weights: _while_asleep(on, 0, weights),
        "without_reset": lambda weights: on.ask_one(0, "load_weights", weights.reference),
    }
    wanted = [(old, of_old), (new, of_new)]
    for name, change in ways.items():
        await on.ask_one(0, "stock_reset")  # so that only the present policy's KV is cached
        await first_token_logprobs(on, prompt)
        weights, truth = wanted[0]
        try:
            await change(weights)
        except Exception as error:
            result[name] = {"error": str(error)}
            continue
        result[name] = _judged(await first_token_logprobs(on, prompt), truth)
        wanted.reverse()
    result["log"] = (await on.ask_one(0, "said", "sleep mode is not supported"))[:1]
    return result


async def _while_asleep(on: Fleet, level: int, weights: Weights) -> None:
    await on.ask_one(0, "sleep", level)
    await on.ask_one(0, "load_weights", weights.reference)
    await on.ask_one(0, "wake_up", level)


async def _ours(
    on: Fleet, prompts: list[list[int]], old: Weights, new: Weights, of_old: list, of_new: list
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A refit with a request in flight, and one back to the old weights with none."""
    for prompt in prompts:
        await first_token_logprobs(on, prompt)
    running = await _begin(on)
    outcome = await on.refit(new)
    judged = _judged(await first_token_logprobs(on, prompts[0]), of_new[0])
    (answer,) = await running
    in_flight = {
        "in_flight": outcome.in_flight,
        "reset_returned": outcome.kv_reset_ok,
        "epochs_of_the_turn": answer.epochs,
    } | judged
    await first_token_logprobs(on, prompts[1])
    await on.refit(old)
    return in_flight, _judged(await first_token_logprobs(on, prompts[1]), of_old[1])


async def _begin(on: Fleet) -> asyncio.Task[list[Answer]]:
    """One turn of another prompt, on its way."""
    prompt = [token % 1000 + 100 for token in range(64)]
    running = asyncio.create_task(sample(on, 0, prompt, _LONG, 1))
    await asyncio.sleep(_BEGUN_S)
    return running


def _judged(said: Logprobs, truth: Logprobs) -> dict[str, Any]:
    return {"to_fresh": _nats(distance(said, truth)), "stale": distance(said, truth) > DIFFERENT}


def _nats(value: float) -> float:
    return float(f"{value:.2g}")


def _prompt(model: Path, topic: str) -> list[int]:
    """Several KV blocks of text; what does not fill a block is never cached."""
    power = {"squares": 2, "cubes": 3}[topic]
    text = "\n".join(f"line {number} = {number**power}" for number in range(40))
    return chat(model).prompt([{"role": "user", "content": f"Sum up these {topic}:\n{text}"}])
