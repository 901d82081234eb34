"""The mock replica as a client sees it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from aiohttp.test_utils import TestClient, TestServer

from nemo_war.config import StepTimePrior
from nemo_war.generation.step_time import StepTimeModel
from nemo_war.simulation import server
from nemo_war.simulation.replica import ReplicaConfig
from nemo_war.simulation.server import Engine, MockServer, detokenize, tokenize

STEP_S = 0.02  # model seconds
CONFIG = ReplicaConfig(100, 16, 8, 512, StepTimeModel(StepTimePrior(base=1000 * STEP_S)))


@pytest_asyncio.fixture
async def engine() -> Engine:
    return Engine(CONFIG, speed=20.0)


@pytest_asyncio.fixture
async def client(engine: Engine) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(MockServer(engine, number=7).application())) as client:
        yield client


async def post(client: TestClient, path: str, body: dict) -> dict:
    response = await client.post(path, json=body)
    assert response.status == 200, await response.text()
    assert response.headers["x-replica"] == "7"
    return await response.json()


async def chat(client: TestClient, *contents: str, **options) -> dict:
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return await post(client, "/v1/chat/completions", {"messages": messages, **options})


async def state(client: TestClient) -> dict:
    return await (await client.get("/state")).json()


async def until_idle(client: TestClient) -> dict:
    async with asyncio.timeout(5):
        while (now := await state(client))["running"] or now["waiting"]:
            await asyncio.sleep(0.005)
    return now


def text_of(count: int, start: int = 1) -> str:
    return detokenize(np.arange(start, start + count, dtype=np.int32))


@pytest.mark.parametrize("text", ["7", " 0  12 2147483647 ", "1 2147483648 3", "9" * 40, "", "  "])
def test_numbers_alone_are_the_tokens_that_they_are_among_words(text):
    assert tokenize(text).tolist() == tokenize(f"{text} word").tolist()[:-1]
    assert tokenize(text).dtype == np.int32


async def test_a_dialogue_that_goes_on_with_its_answer_finds_it_in_the_cache(client):
    first = await chat(client, text_of(40), max_tokens=20)
    answer = first["choices"][0]["message"]["content"]
    assert first["usage"]["prompt_tokens"] == 40
    assert first["usage"]["completion_tokens"] == len(tokenize(answer)) == 20
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    second = await chat(client, text_of(40), answer, text_of(10), max_completion_tokens=5)
    assert second["usage"]["prompt_tokens"] == 70
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}
    assert second["choices"][0]["finish_reason"] == "length"


async def test_the_answer_depends_on_the_prompt_alone_and_not_on_the_api(client):
    text = text_of(40)
    chats = [await chat(client, text, max_tokens=20) for _ in range(2)]
    answers = {each["choices"][0]["message"]["content"] for each in chats}
    for prompt in (text, tokenize(text).tolist()):
        whole = await post(client, "/v1/completions", {"prompt": prompt, "max_tokens": 20})
        answers.add(whole["choices"][0]["text"])
    options = {"max_new_tokens": 20}
    for given in ({"text": text}, {"input_ids": tokenize(text).tolist()}):
        generated = await post(client, "/generate", {**given, "sampling_params": options})
        answers.add(generated["text"])
        assert detokenize(np.array(generated["output_ids"])) == generated["text"]
    assert len(answers) == 1
    assert generated["meta_info"]["prompt_tokens"] == 40
    assert generated["meta_info"]["completion_tokens"] == 20
    assert generated["meta_info"]["cached_tokens"] == 32
    other = await chat(client, text_of(41), max_tokens=20)
    assert other["choices"][0]["message"]["content"] not in answers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_brings_the_same_tokens_step_by_step(client, path):
    given = {"messages": [{"role": "user", "content": "5 6 7"}], "prompt": "5 6 7", "max_tokens": 6}
    whole = (await post(client, path, given))["choices"][0]
    streamed = {**given, "stream": True, "stream_options": {"include_usage": True}}
    response = await client.post(path, json=streamed)
    assert response.headers["x-replica"] == "7"
    assert response.content_type == "text/event-stream"
    events = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n") if line]
    assert events.pop() == "[DONE]"
    *parts, last = map(json.loads, events)
    assert last["usage"]["completion_tokens"] == 6
    choices = [part["choices"][0] for part in parts]
    texts = [choice["delta"]["content"] if "delta" in choice else choice["text"] for choice in choices]
    assert len(texts) == 6
    assert "".join(texts) == (whole["message"]["content"] if "message" in whole else whole["text"])
    assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["length"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_takes_its_request_with_it(client, stream):
    body = {"prompt": text_of(40), "max_tokens": 1500, "stream": stream}
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(client.post("/v1/completions", json=body))
        while not (await state(client))["running"]:
            await asyncio.sleep(0.002)
        if stream:
            response = await asking
            assert (await response.content.readline()).startswith(b"data: ")
            response.close()
        else:
            asking.cancel()
    now = await until_idle(client)
    assert now["kv_use"] == 0
    assert now["output_tokens"] < 1500


async def test_a_request_that_is_cancelled_at_once_stops_nothing(client, engine):
    engine.end(engine.begin(tokenize("1 2 3"), 5, streaming=False))
    await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        assert (await chat(client, "1 2 3", max_tokens=5))["usage"]["completion_tokens"] == 5


async def test_requests_are_batched_and_time_is_scaled(client):
    started = time.monotonic()
    await asyncio.gather(*(chat(client, text_of(30, 100 * n), max_tokens=30) for n in range(8)))
    wall_s = time.monotonic() - started
    now = await state(client)
    assert now["steps"] <= 45, "eight requests in one batch, but for when they arrive"
    assert wall_s >= 30 * STEP_S / 20
    assert now["output_tokens"] == 8 * 30


async def test_a_reset_empties_the_cache_under_a_running_request(client):
    asking = asyncio.create_task(chat(client, text_of(40), max_tokens=100))
    while not (await state(client))["running"]:
        await asyncio.sleep(0.002)
    assert await post(client, "/reset_prefix_cache", {}) == {"success": True}
    assert (await asking)["usage"]["completion_tokens"] == 100
    assert (await state(client))["preemptions"] == 1
    await post(client, "/reset_prefix_cache", {})
    again = await chat(client, text_of(40), max_tokens=1)
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_text_is_the_tokens_in_it(client):
    messages = [{"role": "user", "content": "3 4"}, {"role": "tool", "content": [{"text": "5 hello"}]}]
    rendered = await post(client, "/v1/chat/completions/render", {"messages": messages})
    plain = await post(client, "/tokenize", {"prompt": "3 4 5 hello"})
    assert rendered["token_ids"] == plain["token_ids"] == plain["tokens"]
    assert plain["token_ids"][:3] == [3, 4, 5]
    assert plain["count"] == 4


async def test_routers_are_told_what_they_ask(client):
    assert (await client.get("/health")).status == 200
    models = await (await client.get("/v1/models")).json()
    for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
        info = await (await client.get(path)).json()
        assert info["model_path"] == models["data"][0]["id"]
        assert info["max_total_num_tokens"] == 1600


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": ["3"]}),
        ("/v1/chat/completions", {}),
        ("/v1/completions", {"prompt": [[1], [2, 3]]}),
        ("/v1/completions", {"prompt": [2**40]}),
        ("/v1/completions", {"prompt": "1", "max_tokens": -1}),
        ("/v1/completions", {"prompt": "1", "max_tokens": 10**12}),
        ("/generate", {"text": text_of(1601)}),
        ("/tokenize", {}),
        ("/tokenize", []),
    ],
)
async def test_what_is_wrong_with_a_request_is_said(client, path, body):
    response = await client.post(path, json=body)
    assert response.status == 400
    assert (await response.json())["error"]["message"]
    assert not (await state(client))["waiting"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--speed", "0"], "--speed must be larger than 0"),
        (["--kv-tokens", "3"], "kv_blocks=0"),
        (["--base-ms", "-1"], "greater than or equal to 0"),
    ],
)
def test_flags_that_make_no_sense_are_refused(capsys, flags, says):
    with pytest.raises(SystemExit):
        server.main(["--port", "1", *flags])
    assert says in capsys.readouterr().err
