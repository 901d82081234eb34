"""The router over real sockets: placement, failures, streams, refusals, bounds."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import openai
import pytest
from aiohttp import web
from fake_replica import FakeReplica

from nemo_war.cli import main
from nemo_war.errors import ConfigError
from nemo_war.routing.http.replicas import Replica
from nemo_war.routing.http.router import Router
from nemo_war.routing.http.server import Server
from nemo_war.routing.http.settings import POLICIES, RouterSettings

pytestmark = pytest.mark.timeout(20)

ROOT = Path(__file__).parents[2]
QUICK = {"health_interval_s": 0.05, "outage_timeout_s": 0.2, "grace_s": 2.0}


class Place:
    """A router with its replicas, and a client of it."""

    def __init__(self, router: Router, replicas: list[FakeReplica], url: str, client: aiohttp.ClientSession):
        self.router, self.replicas, self.url, self.client = router, replicas, url, client
        self.said: list[str] = []

    def post(self, text: str = "hi", path: str = "/v1/chat/completions", session: str = "", **fields):
        headers = {"x-session-id": session} if session else {}
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
        return self.client.post(self.url + path, json=body, headers=headers)

    async def ask(self, text: str = "hi", **fields) -> tuple[int, str, dict]:
        """(status, who served, body) of one request."""
        async with self.post(text, **fields) as response:
            return response.status, response.headers.get("x-served-by", ""), await response.json()

    async def idle(self) -> None:
        """Wait until nothing is under way, and check that nothing is left over."""
        scheduler = self.router.queue.scheduler
        await until(lambda: not scheduler.running and not scheduler.waiting)
        await until(lambda: not any(replica.running for replica in self.replicas))
        assert scheduler.check_integrity()
        assert self.router.trajectories.check_integrity()
        assert not self.router.trajectories.active

    def served(self) -> list[int]:
        return [len(replica.served) for replica in self.replicas]


async def until(condition, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def routed(count: int = 2, **settings) -> AsyncIterator[Place]:
    replicas = [FakeReplica(f"r{number}") for number in range(count)]
    for replica in replicas:
        await replica.start()
    said: list[str] = []
    given = {**QUICK, **settings}
    router = Router(RouterSettings(tuple(replica.url for replica in replicas), **given), said.append)
    running = Server(router).runner()
    await running.setup()
    await web.TCPSite(running, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{running.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            place = Place(router, replicas, url, client)
            place.said = said
            yield place
            await place.idle()
    finally:
        await running.cleanup()
        for replica in replicas:
            await replica.kill()


async def test_a_request_passes_through_unchanged_and_so_does_its_answer():
    async with routed(1) as place:
        headers = {"x-mine": "7", "authorization": "Bearer abc", "connection": "x-hop", "x-hop": "1"}
        body = '{"messages": [],  "unknown": {"a": [1.50, "ü"]}}'.encode()
        url = f"{place.url}/v1/chat/completions?q=1%2F2"
        async with place.client.post(url, data=body, headers=headers) as response:
            assert response.status == 200
            assert (await response.json())["choices"][0]["message"]["content"] == "r0 answers 1"
        ((path, seen, fields),) = place.replicas[0].served
        assert (path, fields) == ("/v1/chat/completions", json.loads(body))
        assert (seen["x-mine"], seen["authorization"], seen["content-length"]) == (
            "7",
            "Bearer abc",
            str(len(body)),
        )
        assert "x-hop" not in seen
        assert seen["host"] == place.replicas[0].url.removeprefix("http://")


async def test_a_compressed_body_arrives_as_what_it_was():
    async with routed(1) as place:
        body, headers = gzip.compress(b'{"prompt": "x"}'), {"Content-Encoding": "gzip"}
        async with place.client.post(place.url + "/v1/completions", data=body, headers=headers) as response:
            assert response.status == 200
        assert place.replicas[0].served[0][2] == {"prompt": "x"}


async def test_only_the_paths_of_an_engine_that_clients_need_are_there():
    async with routed(1) as place:
        async with place.client.get(place.url + "/v1/models") as response:
            assert response.status == 200
        status, who, _ = await place.ask(path="/tokenize")
        assert (status, who) == (200, "r0")
        for path in ("/v1/embeddings", "/server_info", "/v1/chat/completions/render"):
            status, _, body = await place.ask(path=path)
            assert (status, body["error"]["type"]) == (404, "invalid_request_error")
        async with place.client.get(place.url + "/v1/completions") as response:
            assert response.status == 404
        assert place.served() == [2]


async def test_a_trajectory_stays_and_openais_client_is_content():
    async with routed(4) as place:
        client = openai.AsyncOpenAI(base_url=place.url + "/v1", api_key="none", max_retries=0)
        for task in range(6):
            messages: list = [{"role": "user", "content": f"task {task}"}]
            homes = set()
            for _ in range(4):
                reply = await client.chat.completions.with_raw_response.create(model="m", messages=messages)
                homes.add(reply.headers["x-served-by"])
                messages += [
                    reply.parse().choices[0].message.model_dump(),
                    {"role": "user", "content": "more"},
                ]
            assert len(homes) == 1
        assert len(place.router.trajectories) == 6
        await client.close()


async def test_nemo_gyms_turns_are_told_apart_by_their_tokens():
    async with routed(3) as place:
        turns = []
        submit = place.router.queue.scheduler.submit
        place.router.queue.scheduler.submit = lambda turn, now: turns.append(turn) or submit(turn, now)
        for replica in place.replicas:
            replica.tokens = True
        task = {"role": "user", "content": "task"}
        homes = {}
        for _ in range(9):
            _, home, body = await place.ask(messages=[task])
            homes[json.dumps(body["choices"][0]["message"] | {"content": ""})] = home
        for message, home in homes.items():
            follow = [task, json.loads(message), {"role": "user", "content": "and now?"}]
            assert (await place.ask(messages=follow, max_tokens=50))[1] == home
        names = [turn.metadata.trajectory for turn in turns]
        assert names[9:] == names[:9]
        assert len(set(names)) == 9
        assert len({turn.metadata.group for turn in turns}) == 1
        assert [(turn.metadata.turn, turn.max_new_tokens) for turn in turns] == [(0, 2048)] * 9 + [
            (1, 50)
        ] * 9
        assert turns[9].prompt.tolist()[:40] == list(range(40))
        assert turns[9].prompt_tokens > len(turns[9].prompt)


async def test_a_stream_arrives_event_by_event_and_is_remembered():
    async with routed(2) as place:
        client = openai.AsyncOpenAI(base_url=place.url + "/v1", api_key="none", max_retries=0)
        messages: list = [{"role": "user", "content": "task"}]
        for replica in place.replicas:
            replica.gate.clear()
        asking = asyncio.create_task(
            client.chat.completions.create(model="m", messages=messages, stream=True)
        )
        await until(lambda: any(place.served()))
        home = place.replicas[place.served().index(1)]
        home.gate.set()
        stream = await asking
        first = await anext(aiter(stream))
        home.gate.clear()  # the first event must not wait for the last
        text = first.choices[0].delta.content
        home.gate.set()
        text += "".join([chunk.choices[0].delta.content async for chunk in stream])
        assert text == "".join(f"{home.name}{n} " for n in range(5))
        for replica in place.replicas:
            replica.gate.set()
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
        assert (await place.ask(messages=messages))[1] == home.name
        assert len(place.router.trajectories) == 1
        await client.close()


@pytest.mark.parametrize("ending", ["orderly", "abrupt"])
async def test_a_stream_is_remembered_before_the_client_has_all_of_it(ending):
    async with routed(2) as place:
        for replica in place.replicas:
            replica.linger_s = 5.0  # clients stop reading at [DONE], and ask on
        messages = [{"role": "user", "content": "task"}]
        async with place.post(messages=messages, stream=True) as response:
            home, text = response.headers["x-served-by"], ""
            async for line in response.content:
                if line == b"data: [DONE]\n":
                    break
                if line.strip():
                    text += json.loads(line[6:])["choices"][0]["delta"]["content"]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
            assert (await place.ask(messages=messages))[1] == home
            assert len(place.router.trajectories) == 1
            if ending == "abrupt":
                await place.replicas[int(home[1])].kill()
                assert b"replica_lost" not in await response.read()


@pytest.mark.parametrize("policy", ["least_outstanding", "sticky", "war"])
async def test_quiet_moments_are_spread_over_all_replicas(policy):
    async with routed(4, policy=policy) as place:
        for number in range(200):
            assert (await place.ask(f"task {number}"))[0] == 200
        assert min(place.served()) >= 25


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "consistent_hash"])
async def test_a_burst_is_spread_as_its_load_is_reserved_at_once(policy):
    async with routed(4, policy=policy) as place:
        for replica in place.replicas:
            replica.gate.clear()
        asking = [asyncio.create_task(place.ask("same task")) for _ in range(64)]
        await until(lambda: sum(place.served()) == 64)
        assert max(place.served()) <= 24
        for replica in place.replicas:
            replica.gate.set()
        assert {status for status, _, _ in await asyncio.gather(*asking)} == {200}


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "consistent_hash"])
async def test_a_group_of_64_siblings_leaves_none_of_four_replicas_idle_up_to_its_last_turn(policy):
    async with routed(4, policy=policy) as place:
        answers = itertools.count()
        for replica in place.replicas:
            replica.reply = lambda fields: f"answer {next(answers)}"
        dialogues: list[list] = [[{"role": "user", "content": "the task of all " * 50}] for _ in range(64)]

        async def go_on(messages: list) -> None:
            _, _, body = await place.ask(messages=messages)
            messages += [body["choices"][0]["message"], {"role": "user", "content": "and now?"}]

        for _ in range(3):
            for replica in place.replicas:
                replica.gate.clear()
                replica.served.clear()
            asking = [asyncio.create_task(go_on(messages)) for messages in dialogues]
            await until(lambda: sum(place.served()) == 64)
            assert min(place.served()) >= 8
            for replica in place.replicas:
                replica.gate.set()
            await asyncio.gather(*asking)
        assert len(place.router.trajectories) == 64


@pytest.mark.parametrize("policy", POLICIES)
async def test_the_request_of_a_session_pinned_to_a_dead_replica_is_served_elsewhere(policy):
    async with routed(3, policy=policy, health_interval_s=30) as place:
        _, home, _ = await place.ask(session="pinned")
        await place.replicas[int(home[1])].kill()
        for _ in range(6):
            status, who, _ = await place.ask(session="pinned")
            assert status == 200
            assert who != home
        lost = [line for line in place.said if "lost" in line]
        assert len(lost) == 1
        assert home[1] in lost[0]


async def test_what_runs_on_a_replica_that_dies_is_done_again_elsewhere_and_told_once():
    async with routed(3, policy="round_robin") as place:
        losses: list[int] = []
        place.router.queue.scheduler.policy.lost = losses.append
        for replica in place.replicas:
            replica.gate.clear()
        asking = [asyncio.create_task(place.ask(f"task {n}")) for n in range(12)]
        await until(lambda: place.served() == [4, 4, 4])
        await place.replicas[1].kill()
        await until(lambda: sum(place.served()) == 16)
        for replica in place.replicas:
            replica.gate.set()
        answers = await asyncio.gather(*asking)
        assert [status for status, _, _ in answers] == [200] * 12
        assert "r1" not in {who for _, who, _ in answers}
        assert losses == [1]
        await place.replicas[1].start()
        await until(lambda: len(place.router.replicas.healthy()) == 3)
        assert "r1" in {(await place.ask(f"again {n}"))[1] for n in range(3)}


async def test_a_replica_that_hangs_gives_its_requests_up_when_its_health_is_not_told():
    async with routed(2, policy="round_robin") as place:
        place.replicas[0].gate.clear()
        asking = [asyncio.create_task(place.ask(f"task {n}")) for n in range(2)]
        await until(lambda: place.served() == [1, 1])
        place.replicas[0].health = 503
        answers = await asyncio.gather(*asking)
        assert {who for _, who, _ in answers} == {"r1"}
        await until(lambda: not place.replicas[0].running)
        place.replicas[0].health = 200
        place.replicas[0].gate.set()
        await until(lambda: len(place.router.replicas.healthy()) == 2)


async def test_a_replica_that_is_lost_between_placement_and_request_ends_the_request():
    replica = Replica(0, "http://127.0.0.1:1", 0)
    replica.health.answered()
    replica.health.failed(refused=True)
    replica.abort()  # before the attempt that was placed there is known
    with pytest.raises(TimeoutError):
        async with replica.attempt():
            await asyncio.Event().wait()


async def test_a_request_goes_to_no_replica_twice_and_to_no_more_than_allowed():
    async with routed(4, max_attempts=3) as place:
        for replica in place.replicas:
            replica.status = 500
        status, _, body = await place.ask()
        assert (status, body["error"]["type"]) == (500, "made_up")
        assert sorted(place.served()) == [0, 1, 1, 1]
        for replica in place.replicas[:3]:
            await replica.kill()
        status, _, body = await place.ask()
        assert (status, body["error"]["type"]) == (500, "made_up")


async def test_errors_of_the_request_pass_through_untouched():
    for profile in ("openai", "gym"):
        async with routed(2, profile=profile) as place:
            for replica in place.replicas:
                replica.status = 422
            status, who, body = await place.ask()
            assert (status, body["error"]["message"]) == (422, f"{who} says no")
            assert sum(place.served()) == 1


@pytest.mark.parametrize(("profile", "statuses"), [("openai", {503, 504, 429}), ("gym", {500})])
async def test_nemo_gym_never_sees_a_status_it_repeats_without_bound(profile, statuses):
    seen = set()
    async with routed(1, profile=profile, max_waiting=1) as place:
        for status in (429, 502, 503, 504, 520):
            place.replicas[0].status = status
            answered, _, body = await place.ask()
            assert answered == (status if profile == "openai" else 500)
            assert body["error"]["message"] == "r0 says no"
        await place.replicas[0].kill()
        asking = [asyncio.create_task(place.ask()) for _ in range(2)]
        for status, _, body in await asyncio.gather(*asking):
            seen.add(status)
            assert body["error"]["type"] in ("no_replica", "overloaded")
            assert body["error"]["code"] == status
        async with place.post(path="/tokenize") as response:
            assert ("Retry-After" in response.headers) == (profile == "openai")
            seen.add(response.status)
    assert seen <= statuses


async def test_too_many_waiting_requests_are_refused_and_the_others_wait_for_a_replica():
    async with routed(1, max_waiting=3, outage_timeout_s=60) as place:
        await place.replicas[0].kill()
        await until(lambda: not place.router.replicas.healthy())
        asking = [asyncio.create_task(place.ask(f"task {n}")) for n in range(3)]
        await until(lambda: place.router.queue.scheduler.waiting == 3)
        async with place.post() as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert (await response.json())["error"]["type"] == "overloaded"
        await place.replicas[0].start()
        assert [status for status, _, _ in await asyncio.gather(*asking)] == [200] * 3


async def test_war_holds_what_finds_no_room_no_longer_than_its_patience():
    async with routed(1, policy="war", kv_tokens=256, patience_s=0.3) as place:
        place.replicas[0].gate.clear()
        asking = [asyncio.create_task(place.ask(text * 800)) for text in "ab"]
        scheduler = place.router.queue.scheduler
        await until(lambda: (scheduler.running, scheduler.waiting) == (1, 1))
        await until(lambda: scheduler.running == 2)
        place.replicas[0].gate.set()
        assert [status for status, _, _ in await asyncio.gather(*asking)] == [200] * 2


async def test_what_a_kv_cache_holds_is_read_off_the_replicas_metrics():
    async with routed(2, policy="war") as place:
        first, second = place.replicas
        assert [each["kv_tokens"] for each in place.router.state()["replicas"]] == [0, 0]
        for replica, blocks in ((first, 16), (second, 8)):
            await replica.kill()
            replica.metrics = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1.0\n'
        await until(lambda: not place.router.replicas.healthy())
        await first.start()
        await until(lambda: place.router.replicas.healthy() == {0})
        first.gate.clear()
        asking = [asyncio.create_task(place.ask(text * 800)) for text in "ab"]
        scheduler = place.router.queue.scheduler
        await until(lambda: (scheduler.running, scheduler.waiting) == (1, 1))
        first.gate.set()
        await second.start()
        assert [status for status, _, _ in await asyncio.gather(*asking)] == [200] * 2
        await until(lambda: place.router.replicas.healthy() == {0, 1})
        assert [each["kv_tokens"] for each in place.router.state()["replicas"]] == [256, 128]
        assert any("holds 256 tokens" in line for line in place.said)


async def test_what_the_operator_says_a_kv_cache_holds_is_believed():
    async with routed(1, kv_tokens=5000) as place:
        await place.replicas[0].kill()
        place.replicas[0].metrics = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="8"} 1.0\n'
        await until(lambda: not place.router.replicas.healthy())
        await place.replicas[0].start()
        await until(lambda: place.router.replicas.healthy() == {0})
        assert [each["kv_tokens"] for each in place.router.state()["replicas"]] == [5000]


async def test_an_outage_is_waited_out_for_a_while_and_then_told_at_once():
    async with routed(2, outage_timeout_s=0.3) as place:
        for replica in place.replicas:
            await replica.kill()
        await until(lambda: not place.router.replicas.healthy())
        started = time.monotonic()
        status, _, body = await place.ask()
        assert (status, body["error"]["type"]) == (503, "no_replica")
        async with place.client.get(place.url + "/health") as response:
            assert response.status == 503
        assert 0.2 < time.monotonic() - started < 2
        started = time.monotonic()
        async with place.post() as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "5")
        assert time.monotonic() - started < 0.1


async def test_a_wait_for_room_has_an_end():
    async with routed(1, wait_timeout_s=0.1) as place:
        place.router.queue.scheduler.policy.choose = lambda *_: None
        status, _, body = await place.ask()
        assert (status, body["error"]["type"]) == (429, "overloaded")


async def test_a_stream_whose_replica_dies_ends_in_one_defined_event():
    async with routed(2) as place:
        for replica in place.replicas:
            replica.break_after = 3
        async with place.post(stream=True) as response:
            lines = [line async for line in response.content if line.strip()]
        assert [json.loads(line[6:])["choices"][0]["delta"]["content"][2] for line in lines[:3]] == [
            "0",
            "1",
            "2",
        ]
        error = json.loads(lines[3][6:])["error"]
        assert (error["type"], error["code"]) == ("replica_lost", 502)
        assert lines[4:] == [b"data: [DONE]\n"]
        client = openai.AsyncOpenAI(base_url=place.url + "/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError, match="was lost"):
            async for _ in await client.chat.completions.create(model="m", messages=[], stream=True):
                pass
        await client.close()
        assert place.router.metrics.counters()["broken_streams"] == 2


async def test_a_stream_of_which_nothing_was_sent_is_begun_again_elsewhere():
    async with routed(2, policy="round_robin") as place:
        place.replicas[0].break_after = 0
        for _ in range(4):
            async with place.post(stream=True) as response:
                assert response.headers["x-served-by"] == "r1"
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert place.replicas[0].served


async def test_a_stream_whose_engine_dies_is_begun_again_elsewhere_or_ends_as_the_replica_says():
    async with routed(2, policy="round_robin", health_interval_s=30) as place:
        messages = [{"role": "user", "content": "task"}]
        place.replicas[0].fail_after = 0
        async with place.post(messages=messages, stream=True) as response:
            assert response.headers["x-served-by"] == "r1"
            assert b"error" not in await response.read()
        place.replicas[0].fail_after = place.replicas[1].fail_after = 3
        async with place.post(messages=messages, stream=True, session="s") as response:
            lines = [line async for line in response.content if line.strip()]
        assert len(lines) == 5
        assert json.loads(lines[3][6:])["error"]["message"] == "engine died"
        counters = place.router.metrics.counters()
        assert counters["broken_streams"] == 1
        assert counters["output_tokens"] == 5  # what broke off is no answer


async def test_cancelled_requests_leave_no_load_behind():
    async with routed(3) as place:
        for replica in place.replicas:
            replica.gate.clear()

        async def stream(number: int, pieces: int) -> int:
            async with place.post(f"task {number}", stream=True) as response:
                return sum([1 async for line in response.content if line.startswith(b"data:")])

        streams = [asyncio.create_task(stream(n, 5)) for n in range(20)]
        whole = [asyncio.create_task(place.ask(f"other {n}")) for n in range(20)]
        await until(lambda: sum(place.served()) == 40)
        for task in streams[::2] + whole[::2]:
            task.cancel()
        await asyncio.gather(*streams[::2], *whole[::2], return_exceptions=True)
        await until(lambda: place.router.queue.scheduler.running == 20)
        await until(lambda: sum(replica.running for replica in place.replicas) == 20)
        for replica in place.replicas:
            replica.gate.set()
        assert await asyncio.gather(*streams[1::2]) == [6] * 10
        assert [status for status, _, _ in await asyncio.gather(*whole[1::2])] == [200] * 10
        await place.idle()
        state = place.router.state()
        assert [each["in_flight"] for each in state["replicas"]] == [0, 0, 0]


async def test_under_random_failures_nothing_leaks_and_no_replica_sees_a_request_twice():
    chance = random.Random(7)
    async with routed(4, outage_timeout_s=5, max_attempts=4) as place:

        async def request(number: int) -> int:
            await asyncio.sleep(chance.random())
            body = {
                "messages": [{"role": "user", "content": f"task {number % 20}"}],
                "stream": number % 3 == 0,
            }
            url, headers = place.url + "/v1/chat/completions", {"x-number": str(number)}
            async with place.client.post(url, json=body, headers=headers) as response:
                if number % 5 != 0:
                    await response.read()
                return response.status

        async def trouble() -> None:
            while True:
                replica = chance.choice(place.replicas)
                await asyncio.sleep(0.05)
                await replica.kill()
                await asyncio.sleep(0.1)
                await replica.start()

        making = asyncio.create_task(trouble())
        asking = [asyncio.create_task(request(number)) for number in range(300)]
        for task in chance.sample(asking, 60):
            asyncio.get_running_loop().call_later(chance.random(), task.cancel)
        answers = await asyncio.gather(*asking, return_exceptions=True)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        for replica in place.replicas:
            numbers = [headers["x-number"] for _, headers, _ in replica.served]
            assert len(numbers) == len(set(numbers))
        statuses = [answer for answer in answers if not isinstance(answer, BaseException)]
        assert set(statuses) <= {200, 502, 503}
        assert statuses.count(200) >= 220


async def test_a_client_that_goes_while_it_waits_leaves_the_queue():
    async with routed(1, outage_timeout_s=60) as place:
        await place.replicas[0].kill()
        await until(lambda: not place.router.replicas.healthy())
        asking = [asyncio.create_task(place.ask(f"task {n}")) for n in range(10)]
        await until(lambda: place.router.queue.scheduler.waiting == 10)
        for task in asking[:9]:
            task.cancel()
        await until(lambda: place.router.queue.scheduler.waiting == 1)
        await place.replicas[0].start()
        assert (await asking[9])[0] == 200
        assert place.served() == [1]


async def test_a_body_that_is_too_large_is_refused():
    async with routed(1, max_body_mib=1) as place:
        status, _, body = await place.ask("x" * 2**20)
        assert (status, body["error"]["type"]) == (413, "invalid_request_error")
        assert (await place.ask("x" * (2**20 - 200)))[0] == 200
        assert place.served() == [1]


@pytest.mark.parametrize("body", ["", "{", "[]", "3", '{"vllm_xargs": {"war": 3}}', "[" * 10**5])
async def test_a_body_that_is_not_understood_is_refused(body):
    async with routed(1) as place:
        async with place.client.post(place.url + "/v1/chat/completions", data=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == 400
        assert place.served() == [0]


async def test_a_client_says_that_a_trajectory_is_over():
    async with routed(2, policy="war", token="s3cret") as place:
        allowed = {"Authorization": "Bearer s3cret"}

        async def end(name: str, headers: dict) -> int:
            async with place.client.delete(f"{place.url}/trajectories/{name}", headers=headers) as response:
                return response.status

        body = {"messages": [{"role": "user", "content": "hi"}]}
        url, named = place.url + "/v1/chat/completions", {"x-session-id": "step 1/task#7"}
        async with place.client.post(url, json=body, headers={**allowed, **named}) as response:
            assert response.status == 200
        assert await end("step%201%2Ftask%237", {}) == 401
        assert len(place.router.trajectories) == 1
        assert await end("step%201%2Ftask%237", allowed) == 204
        assert await end("unknown", allowed) == 204
        state = place.router.state()
        assert [state["trajectories"], *(each["trajectories"] for each in state["replicas"])] == [0, 0, 0]


async def test_with_a_token_only_who_knows_it_is_served():
    async with routed(1, token="s3cret") as place:
        assert "s3cret" not in repr(place.router.settings)
        for presented, expected in (
            ("Bearer s3cret", 200),
            ("Bearer s3cre", 401),
            ("s3cret", 401),
            ("", 401),
        ):
            headers = {"Authorization": presented} if presented else {}
            for path in ("/v1/models", "/state", "/metrics"):
                async with place.client.get(place.url + path, headers=headers) as response:
                    assert response.status == expected
        async with place.client.get(place.url + "/health") as response:
            assert response.status == 200


async def test_idle_trajectories_are_over_and_their_number_is_bounded():
    async with routed(2, idle_s=0.2, max_trajectories=20) as place:
        await asyncio.gather(*(place.ask(f"task {n}") for n in range(60)))
        assert len(place.router.trajectories) == 20
        assert sum(each["trajectories"] for each in place.router.state()["replicas"]) == 20
        await until(lambda: len(place.router.trajectories) == 0)
        assert sum(each["trajectories"] for each in place.router.state()["replicas"]) == 0


async def test_state_and_metrics_tell_what_happened():
    async with routed(2, policy="round_robin", kv_tokens=5000) as place:
        for number in range(4):
            await place.ask(f"task {number}")
        async with place.client.get(place.url + "/state") as response:
            state = await response.json()
        assert [(each["healthy"], each["in_flight"], each["trajectories"]) for each in state["replicas"]] == [
            (True, 0, 2),
            (True, 0, 2),
        ]
        assert (state["waiting"], state["running"], state["trajectories"]) == (0, 0, 4)
        assert state["counters"]["output_tokens"] == 28
        assert state["counters"]["cached_tokens"] == 64
        async with place.client.get(place.url + "/metrics") as response:
            text = await response.text()
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        path = 'path="/v1/chat/completions"'
        assert lines[f'nemo_war_router_requests_total{{{path},status="200"}}'] == "4.0"
        assert lines['nemo_war_router_healthy{replica="1"}'] == "1.0"
        assert lines["nemo_war_router_wait_seconds_count"] == "4.0"
        page = (ROOT / "docs/router.md").read_text()
        undocumented = {re.sub(r"(_bucket|_count|_sum)?({.*)?$", "", line) for line in lines}
        assert not [name for name in undocumented if name not in page and not name.endswith("_created")]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--replica=None: allowed: one URL or more"),
        (["--replica", "host:80"], "--replica='host:80': allowed: http[s]://HOST:PORT"),
        (["--replica", "http://a:1", "--replica", "http://a:1/v1/"], "allowed: each URL once"),
        (["--replica", "http://a:1", "--port", "70000"], "--port=70000: allowed: 0 to 65535; leave it out"),
        (["--replica", "http://a:1", "--policy", "best"], "--policy='best': allowed: war, sticky, "),
        (["--replica", "http://a:1", "--idle-s", "nan"], "--idle-s=nan: allowed: 0.01 to 86400.0"),
        (
            ["--replica", "http://a:1", "--token-env", "NO_SUCH"],
            "--token-env='NO_SUCH': allowed: an env",
        ),
        (["--replica", "http://a:1", "--port", "x"], "--port"),
    ],
)
def test_a_wrong_flag_is_named_in_one_line(flags, said, capsys):
    assert main(["route", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_port_in_use_is_named(capsys):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["route", "--replica", "http://127.0.0.1:1", "--port", str(port)]) == 2
    assert f"--port={port}: allowed:" in capsys.readouterr().err


def test_settings_cannot_be_changed_and_are_checked():
    with pytest.raises(ConfigError, match="--max-attempts=0"):
        RouterSettings(("http://a:1",), max_attempts=0)
    with pytest.raises(AttributeError):
        RouterSettings(("http://a:1",)).port = 3


@pytest.mark.parametrize("patience", [True, False])
async def test_ctrl_c_gives_running_requests_their_time_and_a_second_one_ends_them(patience):
    replica = FakeReplica("r0")
    await replica.start()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "nemo_war.cli", "route", "--replica", replica.url, "--port", "0",
        stderr=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    try:
        while b"routing on" not in (line := await process.stderr.readline()):
            assert line, "it did not start"
        url = line.decode().split("routing on ")[1].split(" ")[0]
        replica.gate.clear()
        async with aiohttp.ClientSession() as client:
            asking = asyncio.create_task(client.post(url + "/v1/completions", json={"prompt": "x"}))
            await until(lambda: replica.running == 1)
            process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.2)
            with pytest.raises(aiohttp.ClientConnectorError):
                await client.get(url + "/health")
            if patience:
                replica.gate.set()
                assert (await asking).status == 200
            else:
                process.send_signal(signal.SIGINT)
                with pytest.raises(aiohttp.ServerDisconnectedError):
                    await asking
        assert await asyncio.wait_for(process.wait(), 5) == 130
        assert (await process.stderr.read()).decode() == "nemo-war: interrupted\n"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await replica.kill()
