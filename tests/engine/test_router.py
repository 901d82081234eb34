"""The router between OpenAI's client and two vLLM servers, all of them processes of their own."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from tests.engine.fleets import ENGINE
from tests.engine.processes import wait_until_gone
from tests.engine.servers import MODEL, Server, client, figure, router, until

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]

POLICIES = ("sticky", "war")
RUNNING = "vllm:num_requests_running"
SERVED = "vllm:request_success_total"
_salts = itertools.count()
TASK = (
    "You look after the timetable of a small railway with three stations, which are called Ash, Birch "
    "and Cedar. Trains need ten minutes from each of them to the next. Write down when they leave."
)


class Place(NamedTuple):
    """Two servers, and the address of a router of each policy in front of them."""

    servers: list[Server]
    routers: dict[str, str]

    def total(self, name: str, **labels: str) -> float:
        """A metric of both servers."""
        return sum(self.figures(name, **labels))

    def figures(self, name: str, **labels: str) -> list[float]:
        """A metric of each server."""
        return [server.figure(name, **labels) for server in self.servers]

    def healthy(self) -> list[bool]:
        """Which replicas which router gives work."""
        states = [httpx.get(url + "/state").json() for url in self.routers.values()]
        return [replica["healthy"] for state in states for replica in state["replicas"]]


@pytest.fixture(scope="module")
def place(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("router")
    with ExitStack() as stack:
        servers = [Server(number, model_folder, folder) for number in range(2)]
        for server in servers:
            stack.callback(server.kill)
            server.start()
        for server in servers:
            server.wait()
        yield Place(servers, {name: stack.enter_context(router(servers, name, folder)) for name in POLICIES})
    assert wait_until_gone(folder) == []


def chat(by: openai.OpenAI, text: str, tokens: int, body: dict[str, Any] | None = None, **more: Any) -> Any:
    """Exactly so many tokens, each the likeliest."""
    return by.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        max_tokens=tokens,
        temperature=0,
        extra_body={"ignore_eos": True} | (body or {}),
        **more,
    )


def plain(answer: Any) -> dict[str, Any]:
    """All of an answer that is the same for the same request."""
    return {name: value for name, value in answer.model_dump().items() if name not in ("id", "created")}


def test_answers_are_those_of_the_server_with_all_that_vllm_takes_and_adds(place: Place) -> None:
    through, direct = client(place.routers["war"]), client(place.servers[0].url)

    def ask(by: openai.OpenAI, **fields: Any) -> dict[str, Any]:
        api = by.chat.completions if "messages" in fields else by.completions
        # vLLM's own fields: of a hot distribution only the top, and a cache of one's own.
        own = {"top_k": 1, "return_token_ids": True, "cache_salt": f"{next(_salts)}"}
        return plain(api.create(model=MODEL, max_tokens=8, temperature=2, extra_body=own, **fields))

    assert [model.id for model in through.models.list()] == [MODEL]
    text = {"model": MODEL, "prompt": TASK}
    ids = httpx.post(place.routers["war"] + "/tokenize", json=text).json()["tokens"]
    of_messages, of_text, of_ids = (
        [ask(by, **fields) for by in (through, direct)]
        for fields in (
            {"messages": [{"role": "user", "content": TASK}], "logprobs": True, "top_logprobs": 2},
            {"prompt": TASK, "logprobs": 2},
            {"prompt": ids, "logprobs": 2},
        )
    )
    for routed, answered in (of_messages, of_text, of_ids):
        assert routed == answered
    assert of_text[0] == of_ids[0]
    assert of_text[0]["choices"][0]["prompt_token_ids"] == ids
    (choice,) = of_messages[0]["choices"]
    assert len(choice["token_ids"]) == 8
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2


def test_a_stream_says_what_a_whole_answer_says(place: Place) -> None:
    by = client(place.routers["war"])
    whole = chat(by, TASK, 12, {"return_token_ids": True})
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = chat(by, TASK, 12, {"return_token_ids": True}, **options)
    assert len(chunks) > 6
    deltas = [chunk.choices[0] for chunk in chunks]
    assert "".join(each.delta.content or "" for each in deltas) == whole.choices[0].message.content
    ids = [token for each in deltas for token in getattr(each, "token_ids", None) or ()]
    assert ids == whole.choices[0].token_ids
    assert last.usage.completion_tokens == 12
    text = {"model": MODEL, "prompt": TASK, "max_tokens": 12, "temperature": 0}
    pieces = [chunk.choices[0].text for chunk in by.completions.create(stream=True, **text)]
    assert len(pieces) > 6
    assert "".join(pieces) == by.completions.create(**text).choices[0].text


def test_what_the_kv_caches_hold_is_read_off_vllm(place: Place, model_folder: Path) -> None:
    model = json.loads((model_folder / "config.json").read_text())
    heads = model["num_key_value_heads"] * model["hidden_size"] // model["num_attention_heads"]
    block = ENGINE["block_size"] * model["num_hidden_layers"] * heads * 2 * 4  # keys and values in float32
    tokens = ENGINE["kv_cache_memory_bytes"] // block * ENGINE["block_size"]
    state = httpx.get(place.routers["war"] + "/state").json()
    assert [replica["kv_tokens"] for replica in state["replicas"]] == [tokens, tokens]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_conversation_stays_where_its_kv_is_without_a_name(place: Place, policy: str) -> None:
    by = client(place.routers[policy])
    dialogues: list[list] = [[{"role": "user", "content": f"{policy} {n}. {TASK}"}] for n in range(4)]
    computed = [0] * len(dialogues)
    for _ in range(3):
        for number, messages in enumerate(dialogues):
            answer = by.chat.completions.create(model=MODEL, messages=messages, max_tokens=16, temperature=0)
            whole_blocks = computed[number] // ENGINE["block_size"] * ENGINE["block_size"]
            assert answer.usage.prompt_tokens_details.cached_tokens >= whole_blocks
            computed[number] = answer.usage.prompt_tokens
            assert computed[number] > 2 * ENGINE["block_size"]
            messages += [
                answer.choices[0].message.model_dump(),
                {"role": "user", "content": "And on Sundays?"},
            ]


@pytest.mark.parametrize("policy", POLICIES)
def test_conversations_that_begin_at_once_are_spread(place: Place, policy: str) -> None:
    before = place.figures(SERVED)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: chat(client(place.routers[policy]), f"{policy} at once {n}", 40), range(8)))
    served = [now - then for now, then in zip(place.figures(SERVED), before, strict=True)]
    assert sum(served) == 8
    assert min(served) >= 3


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_takes_its_request_from_the_server(place: Place, streamed: bool) -> None:
    by, generated = client(place.routers["war"]), "vllm:generation_tokens_total"
    before = place.total(generated)
    if streamed:
        stream = chat(by, "Tell a long story.", 900, stream=True)
        for _ in range(5):
            next(stream)
        assert place.total(RUNNING) == 1
        stream.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            chat(by.with_options(timeout=2), "Tell a long story.", 900)
    until(lambda: place.total(RUNNING) == 0, 5)
    assert 0 < place.total(generated) - before < 450  # it was not simply done
    assert figure(place.routers["war"], "nemo_war_router_in_flight") == 0


def test_what_vllm_refuses_is_told_as_vllm_tells_it_and_asked_once(place: Place) -> None:
    refused = {"status": "4xx", "handler": "/v1/chat/completions"}
    before = place.total("http_requests_total", **refused)
    with pytest.raises(openai.BadRequestError) as direct:
        chat(client(place.servers[0].url), "x", 5000)
    with pytest.raises(openai.BadRequestError) as through:
        chat(client(place.routers["war"]), "x", 5000)
    assert through.value.body == direct.value.body
    assert "max_model_len" in str(through.value)
    assert place.total("http_requests_total", **refused) - before == 2
    assert figure(place.routers["war"], "nemo_war_router_attempt_failures_total") == 0
    assert all(place.healthy())


def test_a_server_that_is_killed_costs_no_request_and_has_work_again_when_it_is_back(place: Place) -> None:
    """The last one, as it takes a server away."""
    victim, survivor = place.servers
    before = survivor.figure(SERVED)

    def ask(number: int) -> int:
        by = client(place.routers[POLICIES[number % 2]])
        return chat(by, f"{number} bottles", 150).usage.completion_tokens

    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, number) for number in range(12)]
        until(lambda: place.total(RUNNING) == 12, 10)
        assert min(place.figures(RUNNING)) >= 3
        victim.kill()
        assert [each.result() for each in asked] == [150] * 12
        assert survivor.figure(SERVED) - before == 12
        for url in place.routers.values():
            assert figure(url, "nemo_war_router_replica_losses_total") == 1
        victim.start()
        victim.wait()
        until(lambda: all(place.healthy()), 10)
        assert list(pool.map(ask, range(12, 24))) == [150] * 12
    assert min(victim.figure(SERVED), survivor.figure(SERVED) - before - 12) >= 3
