"""The way to a shared scheduler without Ray: calls may be late, lost, or answered in vain."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from nemo_war.generation.scheduling.link import UnreachableError
from nemo_war.generation.scheduling.scheduler import SharedScheduler
from nemo_war.routing.policy import Policy

TRANSIT_S = 0.002


class FakeLink:
    """A scheduler that runs here, and what may befall it. Clients may share one.

    Attributes:
        scheduler: of the present life; None while it is dead.
        lives: all there were.
        asked: how often each method was executed.
        delay_s: most that a call, and its answer, may take.
        lost: share of calls, and of answers, that get lost without a word.
        restart_s: what a start takes, where it died by itself.
        restarts: times that a client had it started again.
    """

    def __init__(self, policy: Callable[[], Policy], clock: Callable[[], float], seed: int = 0) -> None:
        self._policy, self._clock = policy, clock
        self._random = Random(seed)
        self.scheduler: SharedScheduler | None = None
        self.lives: list[SharedScheduler] = []
        self.asked: Counter[str] = Counter()
        self.delay_s = TRANSIT_S
        self.lost = 0.0
        self.restart_s = 1.5
        self.restarts = 0
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._death = asyncio.Event()
        self._never = asyncio.Event()
        self._starts: set[asyncio.Task[None]] = set()
        self._begin()

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        return asyncio.ensure_future(self._call(method, arguments))

    async def restart(self) -> None:
        self.restarts += 1
        self.kill()

    async def stop(self) -> None:
        pass

    def kill(self) -> None:
        """The process dies: whoever asked it is told at once, or a little later."""
        dead, self.scheduler = self.scheduler, None
        if dead is None:
            return
        self._death.set()
        for client in dead._clients.values():
            for held in client.turns.values():
                held.placed.cancel()
        self._death = asyncio.Event()
        self._thawed.set()
        start = asyncio.ensure_future(self._start())
        self._starts.add(start)
        start.add_done_callback(self._starts.discard)

    def freeze(self) -> None:
        """The process stands still; what it is asked waits."""
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    def _begin(self) -> None:
        self.scheduler = SharedScheduler(self._policy(), self._clock)
        self.lives.append(self.scheduler)

    async def _start(self) -> None:
        await asyncio.sleep(self.restart_s)
        self._begin()

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        death = self._death
        if self.scheduler is None:
            raise UnreachableError("it is dead")
        dying = asyncio.ensure_future(death.wait())
        doing = asyncio.ensure_future(self._do(method, arguments))
        doing.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait({dying, doing}, return_when=asyncio.FIRST_COMPLETED)
            if death.is_set():
                raise UnreachableError("it died")
            return doing.result()
        finally:
            dying.cancel()
            # A call that is under way may still reach a scheduler, be it one of a later life.

    async def _do(self, method: str, arguments: tuple[Any, ...]) -> Any:
        await asyncio.sleep(self._random.uniform(0, self.delay_s) if self.delay_s > TRANSIT_S else TRANSIT_S)
        await self._thawed.wait()
        scheduler = self.scheduler
        if scheduler is None or self._random.random() < self.lost:
            await self._never.wait()
        assert scheduler is not None
        self.asked[method] += 1
        answer = await getattr(scheduler, method)(*arguments)
        await asyncio.sleep(self._random.uniform(0, self.delay_s))
        if self._random.random() < self.lost:
            await self._never.wait()
        return answer
