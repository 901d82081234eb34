"""Replicas that die, hang or refuse, on real engines: nothing is lost, and nothing stale is served."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from nemo_war.config import HealthConfig, RefitConfig, SpeculativeConfig, WarConfig
from nemo_war.generation.embedded.fleet import Fleet
from nemo_war.generation.embedded.replica import Replica
from nemo_war.generation.embedded.weights import share_weights
from nemo_war.generation.refit import Stage
from nemo_war.routing.round_robin import RoundRobin
from tests.engine.fleets import copy_prompt, fleet, turn
from tests.engine.policies import as_bytes, perturbed
from tests.engine.test_freshness import DIFFERENT, EQUAL, distance, first_token_logprobs

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.asyncio(loop_scope="module")]

WAR = WarConfig(speculative=SpeculativeConfig(max_draft_tokens=4))
HEALTH = HealthConfig(probe_interval_s=1.0, probe_timeout_s=20.0)
REFIT = RefitConfig(in_flight="pause", on_failure="continue", update_timeout_s=60)


class RefusesOnce(Replica):
    """Replica 0 says once that a reset amid a refit failed, as stock vLLM's does with requests in flight."""

    in_refit = False

    async def pause(self, mode: str) -> None:
        self.in_refit = self._number == 0
        await super().pause(mode)

    async def reset_caches(self) -> bool:
        refuses, self.in_refit = self.in_refit, False
        return await super().reset_caches() and not refuses


async def test_what_dies_hangs_or_refuses_costs_time_only(model_folder: Path) -> None:
    prompt, old_prompt = copy_prompt(model_folder, seed=1), copy_prompt(model_folder, seed=2)
    async with fleet(
        model_folder, war=WAR, replicas=2, dtype="float32", refit=REFIT, health=HEALTH,
        replica_class=RefusesOnce,
    ) as on:  # fmt: skip
        before = await first_token_logprobs(on, old_prompt)

        turns = running(on, prompt, 8)
        await asyncio.sleep(1.0)
        outcome = await on.refit(share_weights(as_bytes(perturbed(model_folder, 0.08))))
        assert (outcome.epoch, outcome.fenced) == (1, 1), "the one that refused is fenced off"
        await settle(on, turns, 8)
        assert on._actors._processes.keys() == {0, 1}

        for signum in (signal.SIGKILL, signal.SIGSTOP):
            turns = running(on, prompt, 8)
            await asyncio.sleep(1.0)
            for process in on._actors._processes[0]:
                process.send_signal(signum)
            await settle(on, turns, 8)

        first, second = [await first_token_logprobs(on, old_prompt, replica) for replica in (0, 1)]
    assert distance(first, second) < EQUAL
    assert distance(first, before) > DIFFERENT


def running(on: Fleet, prompt: list[int], count: int) -> asyncio.Future:
    """Turns on all replicas, on their way."""
    dispatcher = on.dispatcher(RoundRobin())
    return asyncio.gather(*(on.generate(turn(prompt, 96), dispatcher) for _ in range(count)))


async def settle(on: Fleet, turns: asyncio.Future, count: int) -> None:
    """All turns are answered in full, and all replicas serve again."""
    answers = await turns
    assert [len(answer.tokens) for _, answer in answers] == [96] * count
    async with asyncio.timeout(240):
        while len(on.serving) < on.size:
            await asyncio.sleep(0.2)
    assert all(on._cycle.stage_of(number) is Stage.SERVING for number in range(on.size))
