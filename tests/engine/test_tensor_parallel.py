"""Two tensor-parallel ranks: one drafts, both verify, and the text is the one without drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_war.config import SpeculativeConfig, WarConfig
from nemo_war.generation.embedded.weights import share_weights
from tests.engine.fleets import RawReplica, begun_copy, fleet, sample, statistics
from tests.engine.policies import as_bytes, perturbed
from tests.engine.test_losslessness import GREEDY_GAP, first_divergence

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

WAR = WarConfig(speculative=SpeculativeConfig(max_draft_tokens=6, max_running=16))


async def test_only_the_output_rank_drafts_and_greedy_text_is_unchanged(
    model_folder: Path, tiny_folder: Path
) -> None:
    prompts = [begun_copy(model_folder, seed) for seed in range(3)]
    async with fleet(
        tiny_folder,
        war=WAR,
        dtype="float32",
        temperature=0.0,
        replica_class=RawReplica,
        tensor_parallel_size=2,
    ) as both:
        drafting = [(await sample(both, 0, prompt, 48, 1))[0] for prompt in prompts]
        counted = [dict(rank) for rank in await both.ask_one(0, "ranks", "war_statistics")]
        await both.ask("enable_drafting", False)
        plain = [(await sample(both, 0, prompt, 48, 1))[0] for prompt in prompts]
        await both.ask("enable_drafting", True)
        await both.refit(share_weights(as_bytes(perturbed(tiny_folder, 0.01))))
        after = await sample(both, 0, prompts[0], 16, 2)
        errors = (await statistics(both))["errors"]
    gaps = [gap for gap in map(first_divergence, plain, drafting) if gap is not None]
    print(f"greedy at TP=2: {len(prompts) - len(gaps)} of {len(prompts)} identical; by rank {counted}")
    assert all(gap < GREEDY_GAP for gap in gaps)
    assert counted[0]["accepted_tokens"] > 30
    assert counted[1]["engine_steps"] == counted[1]["draft_tokens"] == counted[1]["history_tokens"] == 0
    assert all(len(answer.tokens) == 16 for answer in after)
    assert errors == 0
