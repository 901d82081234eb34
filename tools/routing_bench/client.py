"""The agents: they ask, let their tools run, and ask again, at scaled time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from nemo_war.simulation.server import MODEL, detokenize
from nemo_war.simulation.workload import Session, SessionTurn
from tools.routing_bench.measurement import Served
from tools.routing_bench.scenarios import decoding_s


class Agents:
    """Sessions at one address.

    Attributes:
        turns: served so far.
        failed: turns that were not served; their sessions end there.
    """

    def __init__(self, entry: str, speed: float) -> None:
        self.turns: list[Served] = []
        self.failed = 0
        self._url, self._speed = f"{entry}/v1/chat/completions", speed

    async def roll_out(self, sessions: Sequence[Session], concurrency: int | None = None) -> float:
        """All sessions, so many at once, from the first request to the last answer, in model seconds."""
        # Text is made before the clock starts: the replicas' time is what counts, not the client's.
        texts = [[detokenize(turn.prompt) for turn in session.turns] for session in sessions]
        live = asyncio.Semaphore(concurrency or len(sessions))
        connector = aiohttp.TCPConnector(limit=0)
        started = time.perf_counter()
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(3600)) as client:

            async def one(session: Session, prompts: Sequence[str]) -> None:
                async with live:
                    await self._session(client, session, prompts)

            await asyncio.gather(*map(one, sessions, texts))
        return (time.perf_counter() - started) * self._speed

    async def _session(self, client: aiohttp.ClientSession, session: Session, prompts: Sequence[str]) -> None:
        messages: list[dict[str, str]] = []
        for number, (turn, prompt) in enumerate(zip(session.turns, prompts, strict=True)):
            messages = [*([] if turn.reset else messages), {"role": "user", "content": prompt}]
            try:
                messages.append(await self._turn(client, session, number, turn, messages))
            except aiohttp.ClientError:
                self.failed += 1
                return
            await asyncio.sleep(turn.delay_s / self._speed)

    async def _turn(
        self,
        client: aiohttp.ClientSession,
        session: Session,
        number: int,
        turn: SessionTurn,
        messages: list[dict[str, str]],
    ) -> dict[str, str]:
        name = session.name.replace("/", "-").replace("#", "-")
        asked = time.perf_counter()
        async with client.post(
            self._url, json=_body(name, turn, messages), headers=_headers(name, session.group)
        ) as response:
            response.raise_for_status()
            answer = await response.json()
            replica = int(response.headers["x-replica"])
        seconds = (time.perf_counter() - asked) * self._speed
        usage = answer["usage"]
        self.turns.append(
            Served(
                session.name, number, replica, max(0.0, seconds - decoding_s(len(turn.output))),
                usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"],
                usage["completion_tokens"],
            )
        )  # fmt: skip
        message: dict[str, str] = answer["choices"][0]["message"]
        return message


def _body(name: str, turn: SessionTurn, messages: list[dict[str, str]]) -> dict[str, Any]:
    # The program's name is what vllm-router schedules programs by.
    return {
        "model": MODEL,
        "messages": messages,
        "max_tokens": len(turn.output),
        "vllm_xargs": {"agentic_context": json.dumps({"program_id": name})},
    }


def _headers(name: str, group: str) -> dict[str, str]:
    """The trajectory in each router's own words, and its group in ours."""
    return {"x-session-id": name, "x-smg-routing-key": name, "x-nemo-war-group": group}
