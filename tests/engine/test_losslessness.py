"""Drafts never change what is sampled: checked on a real engine at temperature 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from nemo_war.config import SpeculativeConfig, WarConfig
from nemo_war.generation.embedded.fleet import Fleet
from nemo_war.generation.embedded.turn import Answer
from tests.engine.fleets import begun_copy, copy_prompt, fleet, sample, statistics
from tests.engine.statistics import LEVEL, g_test

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

SAMPLES = 320
"""Per prompt and side; with two prompts and four positions, 2,560 next tokens of each side are compared."""
TOKENS = 5
GREEDY_GAP = 1e-3
"""Nats between the two best tokens below which float32 sums in another order may decide."""
DRAFTING, PLAIN = 0, 1
WAR = WarConfig(speculative=SpeculativeConfig(max_draft_tokens=6, max_running=16))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(model_folder: Path) -> AsyncIterator[Fleet]:
    """Two replicas that differ in one thing: whether drafts are made."""
    extension = "tests.engine.extensions.TestExtension"
    async with fleet(model_folder, war=WAR, replicas=2, extension=extension) as made:
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
        p_values = await compare(two, [copy_prompt(model_folder, seed=1)[:-8]], samples=200)
    finally:
        await two.ask_one(DRAFTING, "call", "war_test_break_expansion", False)
    print(f"p-values without the workaround {p_values}")
    assert min(p_values) * len(p_values) < LEVEL


async def test_greedy_text_is_the_same_with_and_without_drafts(model_folder: Path) -> None:
    prompts = [begun_copy(model_folder, seed) for seed in range(6)]
    texts = {}
    for name, war in (("plain", None), ("drafting", WAR)):
        async with fleet(model_folder, war=war, dtype="float32", temperature=0.0) as engines:
            texts[name] = [(await sample(engines, 0, prompt, 64, 1))[0] for prompt in prompts]
            if war:
                counted = await statistics(engines)
                assert counted["accepted_tokens"] > 0.3 * 64 * len(prompts), "too few drafts were accepted"
    gaps = [gap for gap in map(first_divergence, texts["plain"], texts["drafting"]) if gap is not None]
    print(f"greedy: {len(prompts) - len(gaps)} of {len(prompts)} texts identical, gaps {gaps}")
    assert all(gap < GREEDY_GAP for gap in gaps)


def first_divergence(plain: Answer, drafting: Answer) -> float | None:
    """How far the two engines' best tokens lie apart where their texts part, in nats; None if they do not."""
    for at, (a, b) in enumerate(zip(plain.tokens, drafting.tokens, strict=True)):
        if a != b:
            return abs(plain.logprobs[at] - drafting.logprobs[at])
    return None


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
