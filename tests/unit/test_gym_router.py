"""The router that NeMo-Gym is given, by the contract of NeMo-RL's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from fake_replica import FakeReplica

from nemo_war.generation.nemo_rl.gym_router import GymRouter
from nemo_war.metadata import TurnMetadata
from nemo_war.routing.http.identity import EPOCH_HEADER, TURN_HEADER, read_epoch, read_turn, write_turn

pytestmark = pytest.mark.timeout(30)


class Gym:
    """Workers' servers, the router before them, and a client like Gym's."""

    def __init__(self, replicas: list[FakeReplica], router: GymRouter, client: aiohttp.ClientSession) -> None:
        self.replicas, self.router, self._client = replicas, router, client

    async def ask(self, text: str, path: str = "/v1/chat/completions") -> tuple[int, str]:
        """(status, who served)."""
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        url = self.router.base_url().removesuffix("/v1") + path
        async with self._client.post(url, json=body) as response:
            await response.read()
            return response.status, response.headers.get("x-served-by", "")

    async def settle(self, serving: int) -> None:
        """Wait until so many are given work."""
        for _ in range(400):
            if self.router.metrics()["router/serving_backends"] == serving:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("it never came to that")


@contextlib.asynccontextmanager
async def gym(count: int = 2, **options) -> AsyncIterator[Gym]:
    replicas = [FakeReplica(f"r{number}") for number in range(count)]
    for replica in replicas:
        await replica.start()
    urls = [f"{replica.url}/v1" for replica in replicas]
    router = GymRouter(backend_urls=urls, host="127.0.0.1", port=0, **options)
    try:
        async with aiohttp.ClientSession() as client:
            made = Gym(replicas, router, client)
            await made.settle(count)
            yield made
    finally:
        router.stop()
        for replica in replicas:
            await replica.kill()


async def test_it_serves_from_its_construction_on_under_one_address():
    async with gym() as place:
        assert place.router.is_serving()
        assert place.router.base_url().startswith("http://127.0.0.1:")
        assert (await place.ask("hi"))[0] == 200
        assert (await place.ask("hi", "/tokenize"))[0] == 200
        assert (await place.ask("hi", "/v1/embeddings"))[0] == 404


async def test_only_those_that_are_named_are_given_work_until_the_next_word():
    async with gym() as place:
        url = f"{place.replicas[1].url}/v1"
        place.router.set_serving_backends([url, "http://127.0.0.1:9/v1"])
        await place.settle(1)
        assert {(await place.ask(f"text {each}"))[1] for each in range(6)} == {"r1"}
        place.router.set_serving_backends([f"{replica.url}/v1" for replica in place.replicas])
        await place.settle(2)
        assert {(await place.ask(f"other {each}"))[1] for each in range(6)} == {"r0", "r1"}


async def test_with_nobody_named_it_answers_as_it_was_told_to():
    async with gym(no_healthy_backend_status=409, outage_timeout_s=0.1) as place:
        place.router.set_serving_backends([])
        await place.settle(0)
        await asyncio.sleep(0.2)
        assert (await place.ask("hi"))[0] == 409
        assert place.router.metrics()["router/no_healthy_backend_total"] == 1


async def test_a_worker_that_died_costs_no_request_and_is_told_of_once():
    async with gym() as place:
        await place.replicas[0].kill()
        assert [(await place.ask(f"text {each}"))[0] for each in range(4)] == [200] * 4
        failures = place.router.drain_backend_failures()
        assert set(failures) <= {f"{place.replicas[0].url}/v1"}
        assert place.router.drain_backend_failures() == {}


async def test_what_a_worker_learned_is_told_once():
    async with gym(1) as place:
        await place.ask("hi")
        (learned,) = place.router.take_learned()
        assert (learned.replica, learned.turn.turn) == (0, 0)
        assert learned.tokens > 0
        assert place.router.take_learned() == []


async def test_workers_are_told_whose_turn_it_is_whatever_the_client_says():
    async with gym(1) as place:
        url = place.router.base_url() + "/chat/completions"
        forged = {TURN_HEADER: json.dumps({"trajectory": "forged", "group": "g"})}
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        async with aiohttp.ClientSession() as client, client.post(url, json=body, headers=forged) as response:
            assert response.status == 200
        ((_, headers, _),) = place.replicas[0].served
        turn = read_turn(headers[TURN_HEADER])
        assert turn is not None
        assert turn.trajectory != "forged"


def test_a_turn_survives_a_header_and_nothing_else_is_taken_for_one():
    turn = TurnMetadata("a\nb\u20ac", "g", turn=3, epoch=2, critical=True, remaining=7, learn=False)
    assert read_turn(write_turn(turn)) == turn
    assert write_turn(turn).isprintable()
    for text in ("", "{", "[]", '{"trajectory": 1, "group": "g"}', '{"trajectory": "a"}', "{}"):
        assert read_turn(text) is None


def test_an_epoch_is_a_number_or_none():
    assert read_epoch({EPOCH_HEADER: "12"}) == 12
    for text in ("", "-1", "1.5", "²", "9" * 40):
        assert read_epoch({EPOCH_HEADER: text}) == 0
