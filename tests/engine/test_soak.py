"""Ten thousand requests with aborts and preemptions under a fixed memory budget."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from nemo_war.config import HistoryConfig, SpeculativeConfig, WarConfig
from tests.engine.fleets import RawReplica, copy_prompt, fleet, raw, statistics

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.asyncio(loop_scope="module")]

REQUESTS = 10_000
CHECK_EVERY = 1_000
KV_BYTES = 512 * 1024
"""512 tokens of the tiny model: less than sixteen requests need, so that some are preempted all the time."""
WAR = WarConfig(
    speculative=SpeculativeConfig(
        max_draft_tokens=6, max_running=32, history=HistoryConfig(max_tokens=20_000)
    )
)


async def test_ten_thousand_requests_leave_memory_flat_and_the_history_whole(
    model_folder: Path, tiny_folder: Path
) -> None:
    draw = random.Random(0)
    prompts = [copy_prompt(model_folder, lines=3, seed=seed) for seed in range(40)]
    resident, failures = [], []
    async with fleet(
        tiny_folder, war=WAR, extension="tests.engine.extensions.TestExtension", replica_class=RawReplica,
        max_model_len=256, max_num_batched_tokens=512, kv_cache_memory_bytes=KV_BYTES,
    ) as war:  # fmt: skip
        await war.ask("call", "war_test_watch")
        places = asyncio.Semaphore(16)

        async def one(number: int) -> bool:
            prompt = draw.choice(prompts)[: draw.randint(20, 60)]
            temperature = draw.choice((0.0, 1.0))  # a random model repeats itself only when greedy
            length = draw.choice((2, 4, 8, 8, 16, 120 if number % 20 == 0 else 8))
            async with places:
                request = asyncio.ensure_future(
                    raw(
                        war,
                        prompt,
                        group=f"g{number % 50}",
                        max_tokens=length,
                        ignore_eos=True,
                        temperature=temperature,
                    )
                )
                if draw.random() < 0.15:
                    await asyncio.sleep(draw.random() * 0.3)
                    request.cancel()
                try:
                    (answer,) = await request
                    if len(answer.tokens) != length:
                        failures.append(f"{number}: {len(answer.tokens)} tokens, not {length}")
                    return False
                except asyncio.CancelledError:
                    return True

        aborted = 0
        for start in range(0, REQUESTS, CHECK_EVERY):
            aborted += sum(await asyncio.gather(*map(one, range(start, start + CHECK_EVERY))))
            checked = (await war.ask("call", "war_test_check"))[0]
            resident.append(checked["resident"])
            assert checked["live"] <= 16 + 1
        engine_aborts = (await war.ask("aborted"))[0]
        counted, returns = await statistics(war), (await war.ask("call", "war_test_returns"))[0]
    growth = np.polyfit(np.arange(len(resident) // 2), resident[len(resident) // 2 :], 1)[0]
    print(
        f"{REQUESTS} requests, {aborted} given up, {engine_aborts} while they ran, "
        f"{returns} preempted and back, "
        f"{counted['accepted_tokens']} of {counted['draft_tokens']} draft tokens accepted, "
        f"{counted['history_tokens']} tokens of history; resident MiB {[size >> 20 for size in resident]}, "
        f"{growth / 2**20:.2f} MiB more in {CHECK_EVERY} at the end"
    )
    assert not failures
    assert engine_aborts > 0.03 * REQUESTS
    assert returns > 100
    assert counted["errors"] == 0
    assert counted["accepted_tokens"] > 1000
    assert counted["history_tokens"] <= 20_000 + 64
    assert growth < 8 * 2**20
