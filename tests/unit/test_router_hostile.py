"""What a hostile client or replica can do to the router, and what it cannot; see docs/security.md."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from test_router import QUICK, routed, until

from nemo_war.routing.http.answer import Answer
from nemo_war.routing.http.capacity import kv_tokens
from nemo_war.routing.http.router import Router
from nemo_war.routing.http.server import Server
from nemo_war.routing.http.settings import POLICIES, RouterSettings

pytestmark = pytest.mark.timeout(180)

EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
BOUNDLESS = 10**400
"""A number that JSON holds and no float does."""


@contextlib.asynccontextmanager
async def behind(start: bytes, piece: bytes) -> AsyncIterator[tuple[str, Router]]:
    """A router before a replica that is healthy and answers all else with `start`, and `piece` for ever."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /health"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            else:
                writer.write(start)
                while piece:
                    writer.write(piece)
                    await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as replica:
        url = f"http://127.0.0.1:{replica.sockets[0].getsockname()[1]}"
        router = Router(
            RouterSettings((url,), kv_tokens=99, max_answer_mib=1, max_attempts=1, **QUICK), lambda line: None
        )
        running = Server(router).runner()
        await running.setup()
        await web.TCPSite(running, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{running.addresses[0][1]}/v1/completions", router
        finally:
            await running.cleanup()


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", b" " * 65536),
        (b"HTTP/1.1 400 No\r\n\r\n", b" " * 65536),
        (EVENTS, b"data: " * 10_000),
    ],
)
async def test_an_answer_without_end_is_a_failed_attempt_and_its_replica_is_not_lost_by_it(
    start: bytes, piece: bytes
) -> None:
    async with behind(start, piece) as (url, router), aiohttp.ClientSession() as client:
        for _ in range(3):
            async with client.post(url, json={"prompt": "x"}) as response:
                assert response.status == 502
                assert "answered more than 1 MiB" in (await response.json())["error"]["message"]
        assert router.replicas.healthy() == {0}
        assert not router.queue.scheduler.running


async def test_redirects_are_not_followed() -> None:
    start = b"HTTP/1.1 307 Go\r\nLocation: http://127.0.0.1:9/x\r\nContent-Length: 0\r\n\r\n"
    async with (
        behind(start, b"") as (url, _),
        aiohttp.ClientSession() as client,
        client.post(url, json={"prompt": "x"}, allow_redirects=False) as response,
    ):
        assert (response.status, response.headers["Location"]) == (307, "http://127.0.0.1:9/x")


@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
async def test_headers_that_http_does_not_allow_are_not_passed_on(kind: bytes) -> None:
    start = b"HTTP/1.1 200 OK\r\nX-A: a\x01b\r\nX-B: c\r\n d\r\nX-C: e\xff\r\nContent-Type: " + kind
    async with (
        behind(start + b"\r\nContent-Length: 12\r\n\r\ndata: {}\n\n{}", b"") as (url, _),
        aiohttp.ClientSession() as client,
        client.post(url, json={"prompt": "x"}) as response,
    ):
        assert response.status == 200
        assert "X-A" not in response.headers
        assert response.headers["X-C"].startswith("e")


async def test_a_stream_without_end_is_ended_in_one_defined_event() -> None:
    async with (
        behind(EVENTS, b'data: {"choices": []}\n\n' * 1000) as (url, _),
        aiohttp.ClientSession() as client,
    ):
        async with client.post(url, json={"prompt": "x"}) as response:
            *_, error, done, _ = (await response.text()).split("\n\n")
        told = json.loads(error.strip().removeprefix("data: "))
        assert "answered more than 1 MiB" in told["error"]["message"]
        assert done == "data: [DONE]"


@pytest.mark.parametrize(
    "start", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 ", b"HTTP/1.1 200 OK\r\nX: 1\r\n"]
)
async def test_headers_without_end_are_a_failed_attempt(start: bytes) -> None:
    piece = b"X: 1\r\n" * 100 if start.endswith(b"\n") else b"x" * 4096
    async with (
        behind(start, piece) as (url, _),
        aiohttp.ClientSession() as client,
        client.post(url, json={"prompt": "x"}) as response,
    ):
        assert response.status == 502


@pytest.mark.parametrize("policy", POLICIES)
async def test_numbers_and_texts_that_json_can_hold_and_nothing_else_fail_nobody(policy: str) -> None:
    strange = [
        {"max_tokens": BOUNDLESS},
        {"model": "\ud800", "cache_salt": "\udfff"},
        {"session_id": "\ud800"},
        {"vllm_xargs": {"war": {"trajectory": "\ud800", "group": "\udfff"}}},
        {"messages": [{"role": "\ud800", "content": {"\ud800": BOUNDLESS}}]},
    ]
    async with routed(2, policy=policy) as place:
        place.replicas[0].gate.clear()
        place.replicas[1].gate.clear()
        asking = [asyncio.create_task(place.ask("hi", **fields)) for fields in [*strange, {}]]
        await until(lambda: sum(replica.running for replica in place.replicas) == len(asking), 60)
        for replica in place.replicas:
            replica.gate.set()
        assert [status for status, _, _ in await asyncio.gather(*asking)] == [200] * len(asking)


def test_counts_that_are_absurd_are_no_counts() -> None:
    answer = Answer()
    usage = {
        "prompt_tokens": BOUNDLESS,
        "completion_tokens": -1,
        "prompt_tokens_details": {"cached_tokens": 2**31},
    }
    answer.read(json.dumps({"choices": [{"text": "x"}], "usage": usage}).encode())
    outcome = answer.outcome()
    assert outcome is not None
    assert (answer.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (0, 1, None)


@pytest.mark.parametrize(("size", "blocks"), [("16", "9" * 400), ("-16", "4"), ("9" * 5000, "1"), ("", "x")])
def test_a_capacity_that_is_absurd_is_unknown(size: str, blocks: str) -> None:
    assert kv_tokens(f'vllm:cache_config_info{{block_size="{size}",num_gpu_blocks="{blocks}"}} 1.0\n') == 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"session_id": "x" * 1025}, "longer than 1024"),
        ({"vllm_xargs": {"war": {"trajectory": "t", "group": "g" * 1025}}}, "longer than 1024"),
        ({"vllm_xargs": {"war": {"trajectory": "t", "group": "g", "epoch": 2**31}}}, "epoch must be from 0"),
        (
            {"vllm_xargs": {"war": {"trajectory": "t", "group": "g", "remaining": -1}}},
            "remaining must be from 0",
        ),
    ],
)
async def test_names_and_numbers_that_would_be_remembered_are_bounded(fields: dict, says: str) -> None:
    async with routed(1) as place:
        status, _, body = await place.ask(**fields)
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        assert says in body["error"]["message"]


async def test_a_small_body_that_unpacks_to_a_large_one_is_refused() -> None:
    async with routed(1, max_body_mib=1) as place:
        bomb, headers = gzip.compress(bytes(64 << 20)), {"Content-Encoding": "gzip"}
        async with place.client.post(place.url + "/v1/completions", data=bomb, headers=headers) as response:
            assert response.status in (400, 413)
        assert place.served() == [0]


async def test_what_is_no_http_is_told_to_its_client_and_fills_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with routed(1) as place:
        host, _, port = place.url.removeprefix("http://").partition(":")
        for line in (
            b"GET / HTTP/1.1\r\n: \r\n\r\n",
            b"POST / HTTP/1.1\r\nX:\0\r\n\r\n",
            b"\x16\x03\x01 \r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(line)
            assert (await reader.read()).startswith(b"HTTP/1.0 400")
            writer.close()
    assert not caplog.records


async def test_the_rest_of_a_request_that_is_answered_already_fills_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with routed(1) as place:
        host, _, port = place.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /no HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: 9\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 404")
        writer.write(b"not gzip.")
        await reader.read()
        writer.close()
    assert not caplog.records


async def test_clients_that_send_half_a_request_keep_nobody_else_waiting() -> None:
    async with routed(1) as place:
        host, _, port = place.url.removeprefix("http://").partition(":")
        halves = [await asyncio.open_connection(host, int(port)) for _ in range(50)]
        for number, (_, writer) in enumerate(halves):
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{}"[: 10 + 2 * number]
            )
        assert (await place.ask())[0] == 200
        assert not place.router.queue.scheduler.running
        for _, writer in halves:
            writer.close()
