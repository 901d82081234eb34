"""What a request may ask for besides text, with drafts: none fails, all are kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from nemo_war.config import SpeculativeConfig, WarConfig
from nemo_war.generation.embedded.fleet import Fleet
from tests.engine.fleets import RawReplica, begun_copy, chat, copy_prompt, fleet, raw, statistics

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

WAR = WarConfig(speculative=SpeculativeConfig(max_draft_tokens=8, max_running=16))
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def war(model_folder: Path) -> AsyncIterator[Fleet]:
    """Its KV cache holds two long requests, so that a batch of eight preempts."""
    extension = "tests.engine.extensions.TestExtension"
    async with fleet(
        model_folder, war=WAR, extension=extension, replica_class=RawReplica,
        max_model_len=768, max_num_batched_tokens=768, kv_cache_memory_bytes=36 * 2**20,
    ) as made:  # fmt: skip
        await made.ask("call", "war_test_watch")
        yield made


async def many(on: Fleet, prompt: list[int], count: int, **options: object) -> list:
    return [
        answers[0] for answers in await asyncio.gather(*(raw(on, prompt, **options) for _ in range(count)))
    ]


async def drafted(on: Fleet) -> int:
    return (await statistics(on))["accepted_tokens"]


async def test_json_schemas_hold_through_preemptions_and_drafts(war: Fleet, model_folder: Path) -> None:
    # A long prompt that ends in an object of the wanted shape: drafts copy it, and some break the grammar.
    filler = "\n".join(f"item {number}: name {number * 17}, size {number}" for number in range(18))
    ask = f'{filler}\nWrite the last item as JSON, like {{"name": "item 3", "size": 3}}.'
    prompt = chat(model_folder).prompt([{"role": "user", "content": ask}])
    before, returns = await drafted(war), (await war.ask("call", "war_test_returns"))[0]
    answers = []
    for _ in range(2):
        answers += await many(war, prompt, 8, json=SCHEMA, max_tokens=200, temperature=1.0)
    # Free text of many tokens beside it, so that the KV cache overflows again and again.
    mixed = await asyncio.gather(
        many(war, prompt, 4, json=SCHEMA, max_tokens=200, temperature=1.0),
        many(war, prompt, 10, max_tokens=300, min_tokens=300, ignore_eos=True, temperature=1.0),
    )
    answers += mixed[0]
    complete = [answer for answer in answers if answer.finish_reason == "stop"]
    assert len(complete) > 0.5 * len(answers)
    for answer in complete:
        assert set(json.loads(answer.text)) == {"name", "size"}
    came_back = (await war.ask("call", "war_test_returns"))[0] - returns
    accepted = await drafted(war) - before
    print(f"{len(complete)} of {len(answers)} complete, {came_back} preempted and back, {accepted} accepted")
    assert came_back > 0, "nothing was preempted"
    assert accepted > 50, "too little was drafted"
    assert (await statistics(war))["errors"] == 0
    await war.ask("call", "war_test_check")


async def test_eos_in_a_draft_stays_masked_before_min_tokens(war: Fleet, model_folder: Path) -> None:
    speak = chat(model_folder)
    prompt = speak.prompt([{"role": "user", "content": "Answer with the one word: yes"}]) + speak.encode(
        "Yes."
    )
    eos = speak.encode("<|im_end|>")[0]
    short = await many(war, prompt, 8, max_tokens=40, temperature=1.0)
    assert any(answer.tokens[-1] == eos and len(answer.tokens) < 20 for answer in short), "no history of EOS"
    before = await drafted(war)
    answers = await many(war, prompt, 16, max_tokens=40, min_tokens=20, temperature=1.0)
    assert await drafted(war) > before
    for answer in answers:
        assert len(answer.tokens) >= 20
        assert eos not in answer.tokens[:20]


async def test_a_stop_token_inside_a_draft_ends_the_output_and_its_logprobs(
    war: Fleet, model_folder: Path
) -> None:
    prompt, newline = begun_copy(model_folder, 3), chat(model_folder).encode("\n")[0]
    await many(war, prompt, 4, max_tokens=48, temperature=1.0)
    before = await drafted(war)
    answers = await many(war, prompt, 8, max_tokens=48, stop_token_ids=[newline], logprobs=2, temperature=1.0)
    stopped = [answer for answer in answers if answer.tokens[-1] == newline]
    assert stopped
    assert await drafted(war) > before
    for answer in answers:
        assert newline not in answer.tokens[:-1]
        assert answer.logprobs == len(answer.tokens)


async def test_a_stop_string_in_the_middle_of_a_certain_draft_ends_the_text(
    war: Fleet, model_folder: Path
) -> None:
    prompt = begun_copy(model_folder, 3)
    before = await drafted(war)
    answers = await many(war, prompt, 8, max_tokens=48, stop=[" ="], temperature=1.0)
    assert await drafted(war) > before
    assert all(" =" not in answer.text for answer in answers)
    assert any(answer.finish_reason == "stop" for answer in answers)


@pytest.mark.parametrize("room", [1, 2, 3, 5])
async def test_a_repetitive_prompt_may_end_just_before_the_model_length(
    war: Fleet, model_folder: Path, room: int
) -> None:
    prompt = (copy_prompt(model_folder) * 20)[: 768 - room]
    answers = await many(war, prompt, 2, max_tokens=64, ignore_eos=True, temperature=1.0)
    assert [len(answer.tokens) for answer in answers] == [room, room]


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 7},
        {"n": 2},
        {"logprobs": 5},
        {"prompt_logprobs": 1},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"bad_words": ["port"]},
        {"allowed_token_ids": list(range(100, 2000))},
        {"top_k": 1},
        {"temperature": 0.0},
        {"min_tokens": 16, "stop_token_ids": [28]},
    ],
    ids=lambda options: ",".join(options),
)
async def test_requests_with_options_are_served(war: Fleet, model_folder: Path, options: dict) -> None:
    answers = await raw(
        war, begun_copy(model_folder, 4), **({"max_tokens": 16, "temperature": 1.0} | options)
    )
    assert len(answers) == options.get("n", 1)
    assert all(answer.tokens for answer in answers)
    assert (await statistics(war))["errors"] == 0
