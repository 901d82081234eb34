"""Carries out a plan: one coroutine for each replica that is struck."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from tools.chaos_bench.kinds import KINDS
from tools.chaos_bench.plan import Fault, Plan
from tools.chaos_bench.scheduler import SchedulerVictim
from tools.chaos_bench.victim import NotSurvivedError, Victim


@dataclass(frozen=True, slots=True)
class Survived:
    """A fault that is over.

    Attributes:
        fault: of the plan.
        recovery_s: from when it happened to when its victim served again.
        together: others that were not over when it happened.
        stage: that its victim was in.
        reasons: why its victim was fenced off meanwhile.
    """

    fault: Fault
    recovery_s: float
    together: int
    stage: str
    reasons: list[str]


@dataclass(slots=True)
class Injection:
    """Strikes, and waits until it was survived.

    Attributes:
        over: told of each fault that is.
        open: faults that happen, by replica.
        unexplained: fences that no fault explains. A machine that is too slow to answer probes has some.
    """

    plan: Plan
    victims: Sequence[Victim | SchedulerVictim]
    over: Callable[[Survived], None]
    open: dict[int, Fault] = field(default_factory=dict)
    unexplained: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """All of the plan.

        Raises:
            NotSurvivedError: some fault was not.
        """
        try:
            async with asyncio.TaskGroup() as lanes:
                for victim in self.victims:
                    lanes.create_task(self._strike(victim))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _strike(self, victim: Victim | SchedulerVictim) -> None:
        for fault in self.plan.of(victim.number):
            victim.draw = Random(fault.seed)
            await victim.serving()
            await asyncio.sleep(fault.delay_s)
            await victim.serving()
            self.unexplained += [reason for _, reason in victim.take_fences()]
            self.open[victim.number] = fault
            try:
                await self._survive(victim, fault)
            except NotSurvivedError as error:
                raise NotSurvivedError(f"fault {fault.number}, {fault.kind}: {error}") from None
            del self.open[victim.number]

    async def _survive(self, victim: Victim | SchedulerVictim, fault: Fault) -> None:
        victim.calm()
        kind = KINDS[fault.kind]
        await kind.act(victim)
        together = len(self.open) - 1
        if kind.noticed == "fence":
            await victim.fenced()
            victim.calm()
            await victim.serving()
        else:
            await victim.shares_again()
        recovery, reasons = (
            time.monotonic() - victim.struck_at,
            [reason for _, reason in victim.take_fences()],
        )
        self.over(Survived(fault, recovery, together, victim.struck_in, reasons))
