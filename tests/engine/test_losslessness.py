"""Drafts never change what is sampled, at any temperature, beside rows without drafts and greedily."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from nemo_war.config import SpeculativeConfig, WarConfig
from nemo_war.generation.embedded.fleet import Fleet
from nemo_war.generation.embedded.turn import Answer
from tests.engine.fleets import RawReplica, begun_copy, copy_prompt, fleet, raw, sample, statistics
from tests.engine.statistics import LEVEL, g_test

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

SAMPLES = 320
"""Per prompt and side; with two prompts and four positions, 2,560 next tokens of each side are compared."""
TOKENS = 5
MIXED_SAMPLES = 160
"""Per kind of sampling, and each of: speculating rows, plain rows beside them, plain rows elsewhere."""
KINDS = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
)
GREEDY_GAP = 1e-3
"""Nats between the two best tokens below which float32 sums in another order may decide."""
DRAFTING, PLAIN = 0, 1
WAR = WarConfig(speculative=SpeculativeConfig(max_draft_tokens=6, max_running=16))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(model_folder: Path) -> AsyncIterator[Fleet]:
    """Two replicas that differ in one thing: the first drafts, but for critical rows."""
    extension = "tests.engine.extensions.TestExtension"
    async with fleet(
        model_folder, war=WAR, replicas=2, extension=extension, replica_class=RawReplica
    ) as made:
        await made.ask_one(PLAIN, "enable_drafting", False)
        await made.ask_one(DRAFTING, "call", "war_test_mute_critical")
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
    assert accepted > 0.2 * len(KINDS) * MIXED_SAMPLES * (TOKENS - 1), (
        "too few drafts were accepted to prove anything"
    )
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


@pytest.mark.full  # the G-tests say more, and CI has 25 minutes
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
        *(one(side, kind) for _ in range(MIXED_SAMPLES) for kind in range(len(KINDS)) for side in sides)
    )
    return counts


def first_divergence(plain: Answer, drafting: Answer) -> float | None:
    """How far the two engines' best tokens lie apart where their texts part, in nats; None if they do not."""
    for at, (a, b) in enumerate(zip(plain.tokens, drafting.tokens, strict=True)):
        if a != b:
            return abs(plain.logprobs[at] - drafting.logprobs[at])
    return None


async def compare(two: Fleet, prompts: Sequence[list[int]], samples: int = SAMPLES) -> list[float]:
    """p-values of the G-tests, one per prompt and drafted position."""
    p_values = []
    for number, prompt in enumerate(prompts):
        sides = await asyncio.gather(
            *(sample(two, side, prompt, TOKENS, samples, group=f"p{number}") for side in (DRAFTING, PLAIN))
        )
        for position in range(1, TOKENS):  # the first token comes from the prompt's own step, without a draft
            counts = [Counter(answer.tokens[position] for answer in side) for side in sides]
            p_values.append(g_test(*counts))
    return p_values
