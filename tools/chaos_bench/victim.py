"""A replica that something is done to."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import psutil

from nemo_war.generation.refit import Stage
from tools.chaos_bench import faults
from tools.chaos_bench.fleet import ObservedFleet
from tools.chaos_bench.scene import Scene

Moment = Literal["turn", "quieting", "loading", "resetting", "exchanging", "starting", "rejoining"]
_POLL_S = 0.01
"""How often things are looked at that nobody tells of: files of orders, and processes."""
_IN_REFIT = {"quieting": Stage.QUIETING, "loading": Stage.UPDATING, "resetting": Stage.RESETTING}


class NotSurvivedError(Exception):
    """A fault was not survived, or did not happen."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take, in seconds.

    Attributes:
        delay_s: a replica serves so long between two faults, at most.
        patience_s: longest wait for a fault to happen, to be noticed, and for its victim to serve again.
        stage_s: how far into a stage of a refit a fault comes, at most.
        start_s: how far into a start.
    """

    delay_s: float
    patience_s: float
    stage_s: float
    start_s: float


@dataclass(slots=True)
class Victim:
    """One replica, as faults see it.

    Attributes:
        number: of the replica.
        fleet, scene: of the run.
        orders: folder of the orders.
        usual: orders that always hold.
        engine_apart: whether its engine is in other processes than its actor, and is hit as well.
        pace: how long things take.
        draw: of the present fault.
        ordered_at: when it was last told to do something.
        struck_at: when the present fault happened.
        struck_in: the stage that it was in then.
    """

    number: int
    fleet: ObservedFleet
    scene: Scene
    orders: Path
    usual: dict[str, Any]
    engine_apart: bool
    pace: Pace
    draw: Random = field(default_factory=Random)
    ordered_at: float = 0.0
    struck_at: float = 0.0
    struck_in: str = ""

    def calm(self) -> None:
        """Nothing more is to happen to it."""
        faults.renew(self.orders, self.number, **self.usual)

    def take_fences(self) -> list[tuple[float, str]]:
        """When and why it was fenced off since this was called."""
        return self.scene.fences.pop(self.number, [])

    async def at(self, moment: Moment) -> None:
        """Wait until it is in the middle of something."""
        fleet, number = self.fleet, self.number
        match moment:
            case "turn":
                while True:
                    await self.until(lambda: fleet.runs_turns(number), "does not run a turn")
                    await asyncio.sleep(self.draw.uniform(0, 0.1))
                    if fleet.runs_turns(number):
                        return
            case "starting":
                before = set(fleet.processes(number))
                await self.poll(lambda: bool({*fleet.processes(number)} - before), "is not started again")
                await asyncio.sleep(self.draw.uniform(0, self.pace.start_s))
            case "exchanging":
                await self.until(lambda: fleet.exchanging[number] > 0, "is in no exchange of history")
                await asyncio.sleep(self.draw.uniform(0, self.pace.stage_s))
            case "rejoining":
                await self.until(lambda: fleet.rejoins(number), "is not given the weights again")
                await asyncio.sleep(self.draw.uniform(0, self.pace.stage_s))
            case _:
                stage = _IN_REFIT[moment]
                await self.until(lambda: fleet.in_refit(number, stage), f"is never {stage} in a refit")
                await asyncio.sleep(self.draw.uniform(0, self.pace.stage_s))

    def slower(self, *places: str) -> None:
        """Give faults from outside time to strike at these places; a fake engine is through in no time."""
        self.order(slow=dict.fromkeys(places, self.pace.stage_s))

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to one of its processes, which may be gone already."""
        self.strikes()
        if processes := self.fleet.processes(self.number, self.engine_apart):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.draw.choice(processes).send_signal(signum)

    def strikes(self) -> None:
        """The fault happens now."""
        self.struck_at, self.struck_in = time.monotonic(), self.fleet.stage(self.number)

    def order(self, **orders: Any) -> None:
        """Give orders, beside those that it has."""
        faults.order(self.orders, self.number, **orders)

    async def obeys(self, **orders: Any) -> None:
        """Give orders, and wait until one was followed."""
        self.ordered_at = time.monotonic()
        self.order(**orders)
        await self.obeyed()
        self.strikes()
        self.struck_at = min([time.monotonic(), *(at for at, _ in self.scene.fences[self.number])])

    async def obeyed(self) -> None:
        """Wait until an order was followed."""
        await self.poll(
            lambda: bool(faults.orders(self.orders, self.number).get("fired")),
            "does not come to what it is to do",
        )

    async def fenced(self) -> None:
        """Wait until the fleet has noticed."""

        def noticed() -> bool:
            since = (at for at, _ in self.scene.fences[self.number] if at >= self.struck_at)
            return any(since) or self.fleet.stage(self.number) is Stage.FENCED

        await self.until(noticed, "is not noticed to have failed")

    async def shares_again(self) -> None:
        """Wait until an exchange of history failed, and a later one did not."""
        # Since the order, as the exchange may be over by the time that it is seen to have been followed.
        scene, at = self.scene, self.ordered_at
        await self.until(lambda: scene.exchange_failed_at >= at, "leaves every exchange of history intact")
        self.calm()
        since = time.monotonic()
        await self.until(
            lambda: scene.exchange_done_at > since, "is in no complete exchange of history again"
        )

    async def serving(self) -> None:
        """Wait until it serves."""
        await self.until(lambda: self.fleet.serves(self.number), "does not serve again")

    async def until(self, predicate: Callable[[], bool], otherwise: str) -> None:
        """Wait for something that the scene is told of.

        Raises:
            NotSurvivedError: it does not come.
        """
        try:
            await self.scene.until(predicate, self.pace.patience_s)
        except TimeoutError:
            raise self._not_survived(otherwise) from None

    async def poll(self, predicate: Callable[[], bool], otherwise: str) -> None:
        """The same, for what the scene is not told of."""
        deadline = time.monotonic() + self.pace.patience_s
        while not predicate():
            if time.monotonic() > deadline:
                raise self._not_survived(otherwise)
            await asyncio.sleep(_POLL_S)

    def _not_survived(self, otherwise: str) -> NotSurvivedError:
        return NotSurvivedError(f"replica {self.number} {otherwise} within {self.pace.patience_s:g} s")
