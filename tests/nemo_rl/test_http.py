"""Turns that come by HTTP, as NeMo-Gym's do: through our router to the servers in NeMo-RL's workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nemo_war.generation.nemo_rl import gym
from nemo_war.generation.nemo_rl.generation import validating
from nemo_war.routing.http.identity import EPOCH_HEADER
from tests.engine.policies import as_bytes, perturbed
from tests.nemo_rl import world

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def made(model_folder: Path) -> Iterator[Any]:
    config = world.generation_config(model_folder, True, {"speculative": {"max_draft_tokens": 8}})
    config["vllm_cfg"] |= {"expose_http_server": True, "skip_tokenizer_init": False}
    with world.generation(config) as each:
        yield each


@pytest.fixture(scope="module")
def url(made: Any) -> str:
    """What NeMo-Gym would be given."""
    [url] = gym.routed("war", lambda environments, urls: urls)({}, made.dp_openai_server_base_urls)
    assert gym.routed("war", lambda environments, urls: urls)({}, [url]) == [url], "one router is enough"
    return url


async def ask(url: str, model: Path, messages: list[dict[str, str]]) -> str:
    """The model's next message."""
    body = {"model": str(model), "messages": messages, "temperature": 1.0, "top_p": 1.0, "max_tokens": 24}
    async with aiohttp.ClientSession() as client:
        for _ in range(50):  # the router needs a moment to find the servers healthy
            async with client.post(f"{url}/chat/completions", json=body) as response:
                if response.status == 200:
                    assert EPOCH_HEADER not in response.headers, "which is between router and worker"
                    return (await response.json())["choices"][0]["message"]["content"]
                said = f"{response.status}: {await response.text()}"
            time.sleep(0.2)
    raise AssertionError(said)


def remembered(made: Any) -> list[int]:
    """Bytes that each replica would tell others; a count of tokens has the last request's in it, too."""
    blobs = made.fleet.ask_all("export_history")
    return [0 if blob is None else len(blob) for blob in blobs]


async def test_a_conversation_stays_and_is_remembered(made: Any, url: str, model_folder: Path) -> None:
    messages = [
        {"role": "user", "content": "Count on for as long as you can: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, "}
    ]
    before = made.fleet.ask_all("statistics")
    for _ in range(3):
        said = await ask(url, model_folder, messages)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
    after = made.fleet.ask_all("statistics")
    turns = [now["turns"] - then["turns"] for now, then in zip(after, before, strict=True)]
    assert sorted(turns) == [0, 3]
    home = turns.index(3)
    assert after[home]["history_tokens"] > before[home]["history_tokens"]
    assert after[home]["cached_tokens"] > before[home]["cached_tokens"]


async def test_what_is_asked_for_validation_is_not_remembered(
    made: Any, url: str, model_folder: Path
) -> None:
    before = remembered(made)
    assert any(before)
    with validating():
        await ask(url, model_folder, [{"role": "user", "content": "Name ten animals, one after the other."}])
    assert remembered(made) == before
    await ask(url, model_folder, [{"role": "user", "content": "Name ten plants, one after the other."}])
    assert remembered(made) != before


async def test_a_refit_is_heard_of_by_the_router(
    made: Any, url: str, model_folder: Path, tmp_path: Path
) -> None:
    import ray

    (tmp_path / "weights").write_bytes(as_bytes(perturbed(model_folder, 0.05)))
    made.prepare_refit_info({"file": str(tmp_path / "weights")})
    assert ray.get(made.update_weights_from_collective()) == [True, True]
    await ask(url, model_folder, [{"role": "user", "content": "What is the weather like?"}])
    async with (
        aiohttp.ClientSession() as client,
        client.get(url.removesuffix("/v1") + "/state") as response,
    ):
        assert (await response.json())["policy_epoch"] == 1
