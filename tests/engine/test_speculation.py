"""The drafter in a real engine: proved active, carried over refits, ending where output ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from nemo_war.config import SpeculativeConfig, WarConfig
from nemo_war.generation.embedded import engine
from nemo_war.generation.embedded.engine import STOCK_EXTENSION
from nemo_war.generation.embedded.fleet import Fleet
from nemo_war.generation.embedded.replica import Replica
from nemo_war.generation.embedded.weights import share_weights
from tests.engine.fleets import RawReplica, begun_copy, chat, copy_prompt, fleet, raw, sample, statistics
from tests.engine.policies import as_bytes, perturbed

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

WAR = WarConfig(speculative=SpeculativeConfig(max_draft_tokens=8))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def war(model_folder: Path) -> AsyncIterator[Fleet]:
    async with fleet(model_folder, war=WAR, replica_class=RawReplica) as made:
        yield made


async def acceptance_length(on: Fleet, prompt: list[int], count: int = 8) -> float:
    """1 + accepted tokens per draft, over `count` new samples; 1 when nothing was drafted."""
    before = await statistics(on)
    await sample(on, 0, prompt, 48, count)
    after = await statistics(on)
    drafts = after["drafts"] - before["drafts"]
    return 1 + (after["accepted_tokens"] - before["accepted_tokens"]) / max(1, drafts)


async def tokens_per_step(on: Fleet, prompt: list[int]) -> float:
    """Committed tokens per engine step of the greedy text, which teaches the history nothing.

    Greedy, as what samples this small model draws decides more about it than what the history holds.
    """
    before = await statistics(on)
    await raw(on, prompt, learn=False, temperature=0.0, max_tokens=96, ignore_eos=True)
    after = await statistics(on)
    return 96 / (after["engine_steps"] - before["engine_steps"])


async def test_history_carries_over_a_refit(war: Fleet, model_folder: Path) -> None:
    # A prompt without its own answer in it: only other trajectories can be drafts.
    speak = chat(model_folder)
    question = {"role": "user", "content": "Count from 1 to 40, one number per line."}
    prompt = speak.prompt([question]) + speak.encode("1\n2\n3\n4\n5\n")
    cold = await tokens_per_step(war, prompt)
    await sample(war, 0, prompt, 48, 16)
    before = await tokens_per_step(war, prompt)
    await war.refit(share_weights(as_bytes(perturbed(model_folder, 0.01))))
    after = await tokens_per_step(war, prompt)
    await sample(war, 0, prompt, 48, 2)
    held = await statistics(war)
    await war.ask("clear_history")
    emptied = await tokens_per_step(war, prompt)
    print(
        f"tokens per step: cold {cold:.2f}, before {before:.2f}, after the refit {after:.2f}, "
        f"emptied {emptied:.2f}"
    )
    assert held["history_epochs"] == 2
    assert after > 0.8 * before
    assert min(before, after) > 1.3 * emptied


async def test_every_turn_of_a_normal_run_can_be_seen_to_speculate(war: Fleet, model_folder: Path) -> None:
    before = await statistics(war)
    length = await acceptance_length(war, begun_copy(model_folder, 0))
    after = await statistics(war)
    assert length > 1.5
    assert after["speculating_steps"] > before["speculating_steps"]
    assert after["errors"] == 0


async def test_drafting_switched_off_drafts_nothing_and_still_learns(war: Fleet, model_folder: Path) -> None:
    await war.ask("enable_drafting", False)
    before = await statistics(war)
    await sample(war, 0, copy_prompt(model_folder, seed=5), 24, 2)
    after = await statistics(war)
    await war.ask("enable_drafting", True)
    assert after["draft_tokens"] == before["draft_tokens"]
    assert after["history_tokens"] > before["history_tokens"]


async def test_validation_turns_do_not_enter_the_history(war: Fleet, model_folder: Path) -> None:
    before = await statistics(war)
    await sample(war, 0, copy_prompt(model_folder, seed=6), 24, 2, learn=False)
    await sample(
        war, 0, [5, 6, 7], 1, 1, learn=False
    )  # the engine notices the end of a turn in the next step
    after = await statistics(war)
    assert (
        after["history_tokens"] <= before["history_tokens"] + 4
    )  # those of the last turn, which still counts


async def test_output_ends_at_a_stop_string_inside_an_accepted_draft(war: Fleet, model_folder: Path) -> None:
    prompt, speak = copy_prompt(model_folder, seed=3), chat(model_folder)
    await sample(war, 0, prompt, 64, 8)  # make the drafts certain
    answers = await sample(war, 0, prompt, 64, 8, exact=False, stop_strings=(" =",))
    stopped = [
        answer
        for answer in answers
        if answer.finish_reason == "stop" and " =" in speak.text(list(answer.tokens))
    ]
    assert stopped
    for answer in stopped:
        assert len(answer.logprobs) == len(answer.tokens)
        assert " =" not in speak.text(list(answer.tokens[:-1]))


async def test_drafts_never_pass_the_token_limit_or_the_model_length(war: Fleet, model_folder: Path) -> None:
    repetitive = (copy_prompt(model_folder) * 20)[:1020]  # four tokens of room in a model length of 1,024
    answers = await sample(war, 0, repetitive, 4, 4)
    assert all(len(answer.tokens) == 4 for answer in answers)
    answers = await sample(war, 0, repetitive[:200], 2, 4)
    assert all(len(answer.tokens) == 2 for answer in answers)
    assert (await statistics(war))["errors"] == 0


async def test_aborted_turns_leave_the_engine_serving(war: Fleet, model_folder: Path) -> None:
    running = [
        asyncio.ensure_future(sample(war, 0, copy_prompt(model_folder, seed=s), 200, 1)) for s in range(6)
    ]
    await asyncio.sleep(1.0)
    for task in running[:3]:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert len((await sample(war, 0, copy_prompt(model_folder), 8, 1))[0].tokens) == 8
    assert (await statistics(war))["errors"] == 0


@pytest.mark.full  # CI has 25 minutes
async def test_start_fails_when_the_extension_is_missing(model_folder: Path) -> None:
    with pytest.raises(RuntimeError, match=r"replica 0 did not start as configured.*war_attach"):
        async with fleet(model_folder, war=WAR, extension=STOCK_EXTENSION):
            pass


class Misconfigured(Replica):
    """Its engine gets another drafter."""

    async def start(self) -> dict:
        engine.PROPOSER = "tests.engine.extensions.NotOurs"
        return await super().start()


async def test_start_fails_when_the_proposer_is_another(model_folder: Path) -> None:
    with pytest.raises(RuntimeError, match=r"proposer is not active.*NotOurs"):
        async with fleet(model_folder, war=WAR, replica_class=Misconfigured):
            pass
