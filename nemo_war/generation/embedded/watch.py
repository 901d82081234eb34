"""Watches replicas, and brings back those that were lost.

One coroutine minds one replica for as long as the fleet lives: it probes the replica while
that serves, and when it was fenced off, for whatever reason, gives it the present weights
again; where that does not help, or it does not answer, it is started anew first. A
replica that is lost again and again without having answered a turn stays away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from nemo_war.config import HealthConfig
from nemo_war.generation.embedded.actors import Actors, ReplicaLostError

Rejoin = Callable[[int], Awaitable[bool]]
"""Gives a replica that is up what the fleet has; whether it serves now."""


class Watch:
    """Minds the replicas of a fleet."""

    def __init__(
        self,
        actors: Actors,
        health: HealthConfig,
        lost: Callable[[int, str], object],
        rejoin: Rejoin,
        gave_up: Callable[[int, str], None],
    ) -> None:
        """Mind none yet.

        Args:
            actors: who is probed and started.
            health: how often, and how patiently.
            lost: told of a replica that does not answer; it is to be fenced off.
            rejoin: asked when a replica is up again.
            gave_up: told of one that will not be back, and why.
        """
        self._actors = actors
        self._health = health
        self._lost = lost
        self._rejoin = rejoin
        self._gave_up = gave_up
        self._fences: dict[int, asyncio.Event] = {}
        self._failures: dict[int, int] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def fence(self, number: int) -> asyncio.Event:
        """Set once the replica is fenced off."""
        return self._fences[number]

    def mind(self, number: int) -> None:
        """The replica serves from here on."""
        if number not in self._fences or self._fences[number].is_set():
            self._fences[number] = asyncio.Event()
        self._failures.setdefault(number, 0)
        if number not in self._tasks:
            self._tasks[number] = asyncio.create_task(self._mind(number))

    def fenced(self, number: int) -> None:
        """The replica is fenced off."""
        if number in self._fences:
            self._fences[number].set()

    def answered(self, number: int) -> None:
        """The replica answered a turn, so that it may be brought back as often again."""
        self._failures[number] = 0

    async def stop(self) -> None:
        """Mind nothing any more."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _mind(self, number: int) -> None:
        while True:
            answers = await self._until_fenced(number)
            reason = await self._bring_back(number, answers)
            if reason:
                self._gave_up(number, reason)
                return

    async def _until_fenced(self, number: int) -> bool:
        """Probe the replica now and then; one that does not answer is lost. Whether it may answer still."""
        fence = self._fences[number]
        while not fence.is_set():
            try:
                async with asyncio.timeout(self._health.probe_interval_s):
                    await fence.wait()
            except TimeoutError:
                reason = await self._silence(number)
                if reason:
                    self._lost(number, reason)
                    return False
        return True

    async def _bring_back(self, number: int, answers: bool) -> str:
        """Until it serves; why not, where that was tried as often as it may be."""
        reason = "is lost again and again"
        while self._failures[number] < self._health.max_restarts:
            self._failures[number] += 1
            if answers and not await self._silence(number) and await self._rejoin(number):
                return ""
            answers = True
            await self._actors.kill(number)
            try:
                await self._actors.start(number)
            except Exception as error:
                reason = f"did not start again: {error}"
                continue
            if await self._rejoin(number):
                return ""
        await self._actors.kill(number)
        return reason

    async def _silence(self, number: int) -> str:
        """Why the replica does not answer a probe; empty where it does."""
        try:
            await self._actors.ask(number, "ping", timeout_s=self._health.probe_timeout_s)
        except ReplicaLostError as error:
            return error.reason
        except Exception as error:
            return f"answered a probe with an error: {error}"
        return ""
