"""Drafts never change what is sampled: checked on a real engine at temperature 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from scipy import stats

from nemo_war.config import SpeculativeConfig, WarConfig
from nemo_war.generation.embedded.fleet import Fleet
from tests.engine.fleets import begun_copy, fleet, sample, statistics

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

LEVEL = 1e-3
"""Of the whole test: a lossless engine fails one run in a thousand."""
SAMPLES = 320
"""Per prompt and side; with two prompts and four positions, 2,560 next tokens of each side are compared."""
TOKENS = 5
DRAFTING, PLAIN = 0, 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(model_folder: Path) -> AsyncIterator[Fleet]:
    """Two replicas that differ in one thing: whether drafts are made."""
    war = WarConfig(speculative=SpeculativeConfig(max_draft_tokens=6, max_running=16))
    extension = "tests.engine.extensions.TestExtension"
    async with fleet(model_folder, war=war, replicas=2, extension=extension) as made:
        await made.ask_one(PLAIN, "enable_drafting", False)
        yield made


async def test_next_token_counts_agree_with_and_without_drafts(two: Fleet, model_folder: Path) -> None:
    before = await statistics(two, DRAFTING)
    p_values = await compare(two, [begun_copy(model_folder, seed) for seed in (1, 2)])
    after = await statistics(two, DRAFTING)
    drafted = after["draft_tokens"] - before["draft_tokens"]
    accepted = after["accepted_tokens"] - before["accepted_tokens"]
    plain = await statistics(two, PLAIN)
    print(f"p-values {np.round(p_values, 4)}; {drafted} draft tokens, {accepted / drafted:.0%} accepted")
    assert plain["draft_tokens"] == 0
    assert accepted > 0.25 * 2 * SAMPLES * (TOKENS - 1), "too few drafts were accepted to prove anything"
    assert accepted < 0.97 * drafted, "nothing was ever rejected, so rejection was not tested"
    assert min(p_values) * len(p_values) > LEVEL


async def test_the_same_comparison_fails_without_the_workaround(two: Fleet, model_folder: Path) -> None:
    await two.ask_one(DRAFTING, "call", "war_test_break_expansion", True)
    try:
        p_values = await compare(two, [begun_copy(model_folder, 1)], samples=160)
    finally:
        await two.ask_one(DRAFTING, "call", "war_test_break_expansion", False)
    print(f"p-values without the workaround {p_values}")
    assert min(p_values) * len(p_values) < LEVEL


async def compare(two: Fleet, prompts: Sequence[list[int]], samples: int = SAMPLES) -> list[float]:
    """p-values of the G-tests, one per prompt and drafted position."""
    import asyncio

    p_values = []
    for number, prompt in enumerate(prompts):
        sides = await asyncio.gather(
            *(sample(two, side, prompt, TOKENS, samples, group=f"p{number}") for side in (DRAFTING, PLAIN))
        )
        for position in range(1, TOKENS):  # the first token comes from the prompt's own step, without a draft
            counts = [Counter(answer.tokens[position] for answer in side) for side in sides]
            p_values.append(g_test(*counts))
    return p_values


def g_test(a: Counter[int], b: Counter[int], least: int = 10) -> float:
    """p-value of two samples being of one distribution; rare tokens are pooled."""
    common = [token for token in a | b if a[token] + b[token] >= least]
    table = np.array(
        [[side[token] for token in common] + [side.total() - sum(side[t] for t in common)] for side in (a, b)]
    )
    table = table[:, table.sum(axis=0) > 0]
    if table.shape[1] < 2:
        return 1.0
    return float(stats.chi2_contingency(table, lambda_="log-likelihood").pvalue)
