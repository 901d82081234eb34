"""The scheduler as something that is done something to, in the shape of a `Victim`."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass, field
from random import Random

from nemo_war.generation.scheduling.actor import RayLink
from nemo_war.generation.scheduling.dispatcher import SharedDispatcher
from tools.chaos_bench.plan import SCHEDULER
from tools.chaos_bench.scene import Scene
from tools.chaos_bench.victim import NotSurvivedError, Pace

_POLL_S = 0.02


@dataclass(slots=True)
class SchedulerVictim:
    """The actor that places turns.

    Attributes:
        dispatcher, link: the ways to it.
        scene: told that something happened, as it tells nobody by itself.
        pace: how long things take.
        draw: of the present fault.
        struck_at: when that happened.
        struck_in: whether it answered then.
        number: in the place of a replica's.
    """

    dispatcher: SharedDispatcher
    link: RayLink
    scene: Scene
    pace: Pace
    draw: Random = field(default_factory=Random)
    struck_at: float = 0.0
    struck_in: str = ""
    number: int = SCHEDULER
    _life: str | None = None
    _process: int = 0

    def calm(self) -> None:
        """It takes no orders."""

    def take_fences(self) -> list[tuple[float, str]]:
        """No fence is put up around it."""
        return []

    async def serving(self) -> None:
        """Wait until it answers."""
        await self._until(self._answers, "does not answer again")
        statistics = await self.link.call("statistics")
        self._life, self._process = self._heard, statistics["process"]

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to its process."""
        self.struck_at, self.struck_in = time.monotonic(), "answering"
        os.kill(self._process, signum)

    async def fenced(self) -> None:
        """Wait until it is out, or was started again before anybody asked."""
        await self._until(lambda: self.dispatcher.out or self._heard != self._life, "is not missed")

    async def shares_again(self) -> None:
        """It has no history."""

    @property
    def _heard(self) -> str | None:
        return self.dispatcher.life

    def _answers(self) -> bool:
        return not self.dispatcher.out and self._heard is not None

    async def _until(self, predicate, otherwise: str) -> None:
        deadline = time.monotonic() + self.pace.patience_s
        while not predicate():
            if time.monotonic() > deadline:
                raise NotSurvivedError(f"the scheduler {otherwise} within {self.pace.patience_s:g} s")
            await asyncio.sleep(_POLL_S)
        self.scene.changed()
