"""Whatever the sampling parameters, drafts leave the distribution alone, also beside rows without."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from nemo_war.config import SpeculativeConfig, WarConfig
from nemo_war.generation.embedded.fleet import Fleet
from tests.engine.fleets import RawReplica, begun_copy, fleet, raw, statistics
from tests.engine.statistics import LEVEL, g_test

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

SAMPLES = 160
"""Per kind of sampling, and each of: speculating rows, plain rows beside them, plain rows elsewhere."""
TOKENS = 4
DRAFTING, PLAIN = 0, 1
WAR = WarConfig(speculative=SpeculativeConfig(max_draft_tokens=6, max_running=16))
KINDS = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(model_folder: Path) -> AsyncIterator[Fleet]:
    extension = "tests.engine.extensions.TestExtension"
    async with fleet(
        model_folder, war=WAR, replicas=2, extension=extension, replica_class=RawReplica
    ) as made:
        await made.ask_one(PLAIN, "enable_drafting", False)
        await made.ask_one(DRAFTING, "call", "war_test_mute_critical")
        yield made


async def test_rows_of_all_kinds_in_one_batch_keep_their_distributions(
    two: Fleet, model_folder: Path
) -> None:
    prompt = begun_copy(model_folder, 1)
    before = await statistics(two, DRAFTING)
    sides = await asyncio.gather(
        sampled(two, DRAFTING, prompt, mixed=True), sampled(two, PLAIN, prompt, mixed=False)
    )
    after = await statistics(two, DRAFTING)
    counts = sides[0] | sides[1]
    p_values = []
    for kind, position in itertools.product(range(len(KINDS)), range(1, TOKENS)):
        elsewhere = counts["elsewhere", kind, position]
        p_values += [
            g_test(counts["speculating", kind, position], elsewhere),
            g_test(counts["plain beside", kind, position], elsewhere),
        ]
    drafted = after["draft_tokens"] - before["draft_tokens"]
    accepted = after["accepted_tokens"] - before["accepted_tokens"]
    print(
        f"{len(p_values)} comparisons, p-values {np.round(sorted(p_values)[:5], 4)} and up; "
        f"{drafted} draft tokens, {accepted / max(1, drafted):.0%} accepted"
    )
    assert accepted > 0.2 * len(KINDS) * SAMPLES * (TOKENS - 1), (
        "too few drafts were accepted to prove anything"
    )
    assert accepted < 0.97 * drafted, "nothing was ever rejected, so rejection was not tested"
    assert min(p_values) * len(p_values) > LEVEL


async def sampled(
    two: Fleet, replica: int, prompt: list[int], *, mixed: bool
) -> dict[tuple[str, int, int], Counter[int]]:
    """Counts of tokens by side, kind and position; all kinds and sides stand in the same batches."""
    counts: dict[tuple[str, int, int], Counter[int]] = {}
    gate = asyncio.Semaphore(16)
    sides = ("speculating", "plain beside") if mixed else ("elsewhere",)

    async def one(side: str, kind: int) -> None:
        async with gate:
            (answer,) = await raw(
                two, prompt, replica=replica, critical=side == "plain beside",
                max_tokens=TOKENS, min_tokens=TOKENS, ignore_eos=True, **KINDS[kind],
            )  # fmt: skip
        for position, token in enumerate(answer.tokens):
            counts.setdefault((side, kind, position), Counter())[token] += 1

    await asyncio.gather(
        *(one(side, kind) for _ in range(SAMPLES) for kind in range(len(KINDS)) for side in sides)
    )
    return counts
