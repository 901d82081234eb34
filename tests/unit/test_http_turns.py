"""The workers' HTTP servers: a header says whose turn it is, another what it was generated under."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from nemo_war.generation.nemo_rl.call import CALL, Call, Served
from nemo_war.generation.nemo_rl.http_turns import HttpTurns
from nemo_war.metadata import TurnMetadata
from nemo_war.routing.http.identity import EPOCH_HEADER, TURN_HEADER, write_turn

TURN = TurnMetadata("t", "g", 2)


async def serve(headers: list[tuple[bytes, bytes]], served: list[Served]) -> tuple[Call, dict[bytes, bytes]]:
    """The call that the application saw, and the answer's headers."""
    seen: list[Call] = []

    async def application(
        scope: MutableMapping[str, Any], receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]
    ) -> None:
        call = CALL.get()
        assert call is not None
        seen.append(call)
        call.served += served
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
        await send({"type": "http.response.body", "body": b""})

    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await HttpTurns(application)({"type": "http", "headers": headers}, lambda: None, send)
    return seen[0], dict(sent[0]["headers"])


async def test_a_turn_is_passed_on_to_whoever_serves_it() -> None:
    call, _ = await serve([(TURN_HEADER.encode(), write_turn(TURN).encode())], [])
    assert call.turns == [TURN]


async def test_without_a_turn_or_with_nonsense_it_is_served_all_the_same() -> None:
    for headers in ([], [(TURN_HEADER.encode(), b"\xff{")]):
        call, answered = await serve(headers, [])
        assert call.turns is None
        assert answered == {b"x": b"y"}


async def test_an_answer_says_under_which_policy_it_ended() -> None:
    _, answered = await serve([], [Served(3, 4, 0)])
    assert answered == {b"x": b"y", EPOCH_HEADER.encode(): b"4"}
