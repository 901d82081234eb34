"""The shell of the refit cycle: has replicas do what it asks for, and tells it what they said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from nemo_war.generation.embedded.actors import Actors
from nemo_war.generation.embedded.weights import Weights
from nemo_war.generation.refit import Phase, RefitCycle, Stage

_TICK_S = 0.2
"""How often deadlines, and fences that others put up, are looked at."""


class Refitting:
    """Drives a cycle. Whatever a replica fails at, and whatever takes too long, fences it off."""

    def __init__(
        self,
        cycle: RefitCycle,
        actors: Actors,
        running: Callable[[int], int],
        changed: asyncio.Condition,
        update_timeout_s: float,
    ) -> None:
        """Drive nothing yet.

        Args:
            cycle: what happens next, and what may not.
            actors: who is asked.
            running: turns placed on a replica; from the decision on, so that none on its way is overlooked.
            changed: notified when a turn is over.
            update_timeout_s: longest a replica may take to rejoin, or to resume.
        """
        self._cycle = cycle
        self._actors = actors
        self._running = running
        self._changed = changed
        self._update_timeout_s = update_timeout_s

    async def run(self, weights: Weights, members: Iterable[int]) -> None:
        """One refit. The cycle says how it ended."""
        members = list(members)
        self._cycle.begin(weights.digest, members)
        await self._everywhere(Phase.QUIETING, self._quiet)
        await self._everywhere(Phase.UPDATING, partial(self._update, weights))
        await self._everywhere(Phase.RESETTING, self._reset)
        if self._cycle.in_flight != "drain" and self._cycle.admits:
            await asyncio.gather(*map(self._resume, filter(self._cycle.serves, members)))

    async def rejoin(self, number: int, weights: Weights | None) -> None:
        """Give a replica that is fenced off what the others have. The cycle says whether it serves now.

        Args:
            number: of the replica.
            weights: of this epoch; None before the first refit, as it has what all started with.
        """
        self._cycle.rejoin(number)
        try:
            async with asyncio.timeout(self._update_timeout_s):
                if weights is None:
                    self._cycle.updated(number, self._cycle.digest)
                else:
                    await self._update(weights, number)
                await self._actors.ask(number, "resume")  # it may have been lost while it was paused
                if self._cycle.stage_of(number) is Stage.RESETTING:
                    await self._reset(number)
        except Exception as error:
            self._cycle.fence(number, f"did not rejoin: {_first_line(error)}")

    async def _everywhere(self, phase: Phase, act: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Have the replicas that are in a phase do what it is for, until the cycle leaves it."""
        cycle = self._cycle
        tasks = {
            number: asyncio.create_task(self._guarded(phase, act, number)) for number in cycle.waiting_for
        }
        try:
            while cycle.phase is phase:
                pending = [tasks[number] for number in cycle.waiting_for]
                await asyncio.wait(pending, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
                cycle.check_deadlines()
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _guarded(
        self, phase: Phase, act: Callable[[int], Coroutine[Any, Any, None]], number: int
    ) -> None:
        try:
            await act(number)
        except Exception as error:
            self._cycle.fence(number, f"failed while {phase}: {_first_line(error)}")

    async def _quiet(self, number: int) -> None:
        """Nothing runs there any more, or what runs is frozen."""
        match self._cycle.in_flight:
            case "pause":
                await self._actors.ask(number, "pause", "keep")
            case "drain":
                await self._idle(number)
            case "abort":
                await self._actors.ask(number, "pause", "abort")
                # A turn that was on its way then waits there until `resume`; it is taken back, too.
                while not await self._idle(number, _TICK_S):
                    await self._actors.ask(number, "pause", "abort")
        self._cycle.quiet(number)

    async def _idle(self, number: int, patience_s: float | None = None) -> bool:
        """Wait until no turn runs there; False where some still do."""
        try:
            async with asyncio.timeout(patience_s), self._changed:
                return await self._changed.wait_for(lambda: not self._running(number))
        except TimeoutError:
            return False

    async def _update(self, weights: Weights, number: int) -> None:
        report = await self._actors.ask(number, "load_weights", weights.reference)
        self._cycle.updated(number, report["digest"])

    async def _reset(self, number: int) -> None:
        """Empty its caches; what it generates from then on counts as of the coming epoch."""
        cycle = self._cycle
        done = await self._actors.ask(number, "reset_caches")
        if done:
            await self._actors.ask(number, "set_epoch", cycle.epoch + (not cycle.admits))
        cycle.reset(number, done)

    async def _resume(self, number: int) -> None:
        try:
            await self._actors.ask(number, "resume", timeout_s=self._update_timeout_s)
        except Exception as error:
            self._cycle.fence(number, f"did not resume: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
