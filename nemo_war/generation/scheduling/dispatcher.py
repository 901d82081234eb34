"""The way to place turns by a scheduler that many processes share. It not answering costs speed only.

While it is out (`heartbeat`), all turns that wait there, and all that come, are placed here and
at once: on the replica that consistent hashing gives their trajectory. Once it answers, turns go
there again.

Two rules keep the books of both sides right, whatever call was lost or late:

* a turn that was sent there is finished there, once, in the same life: when it is over, when
  it is placed here instead, when its caller goes away. That is repeated until it was heard
  (`outbox`).
* a placement counts when this side takes it. If a refit began meanwhile, or that replica was
  lost, it is given back and the turn asks again.

No answer to a call is relied on: what was not heard is sent again after the next answer to
`ping`, which tells what the scheduler knows.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

from nemo_war.generation.scheduling.heartbeat import Heartbeat, Outages, Patience, first_line
from nemo_war.generation.scheduling.link import Link, UnreachableError
from nemo_war.generation.scheduling.outbox import Outbox
from nemo_war.generation.scheduling.scheduler import OtherLifeError, Pulse
from nemo_war.routing.consistent_hash import ConsistentHash
from nemo_war.routing.dispatcher import Dispatcher
from nemo_war.routing.facts import Outcome, Placement, ReplicaFacts, TurnFacts
from nemo_war.routing.scheduler import Scheduler
from nemo_war.snapshot import State

_log = logging.getLogger(__name__)

_STATE_S = 10.0
"""Longest a checkpoint waits for what placement learned."""
_AGAIN_S = 0.05
"""Pause before a turn asks again whose placement could not be taken."""


@dataclass(slots=True)
class _Waiting:
    """A turn that waits there.

    Attributes:
        answer: its placement; None where it is to be placed here.
        asked: the beat before which it was last sent; -1: it never was.
        life: to which it was sent.
    """

    turn: TurnFacts
    answer: asyncio.Future[Placement | None]
    asked: int = -1
    life: str | None = None


class _Placed(NamedTuple):
    """A turn that runs.

    Attributes:
        life: of the scheduler that placed it; None where it was placed here.
        ticket: number of its reservation, there or here.
    """

    replica: int
    life: str | None
    ticket: int


class SharedDispatcher:
    """Lets turns wait for their placement by a scheduler elsewhere. All calls come from one event loop."""

    def __init__(
        self,
        link: Link,
        replicas: Callable[[], Sequence[ReplicaFacts] | None],
        clock: Callable[[], float],
        patience: Patience | None = None,
    ) -> None:
        """Ask nothing yet.

        Args:
            link: the way to the scheduler.
            replicas: the replicas as they are now; None while nothing may be placed.
            clock: seconds.
            patience: how long to wait for what.
        """
        self._link = link
        self._replicas = replicas
        self._name = uuid4().hex
        self._here = Dispatcher(Scheduler(ConsistentHash()), replicas, clock)
        self._heartbeat = Heartbeat(
            link, self._ping, self._matters, self._hear, self._take_back, clock, patience or Patience()
        )
        self._outbox = Outbox(self._send)
        self._numbers = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        self._placed: dict[int, _Placed] = {}
        self._running: Counter[int] = Counter()
        self._told: tuple[Sequence[ReplicaFacts] | None] | None = None  # of the replicas; None: nothing
        self._failure: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def out(self) -> bool:
        """Whether the scheduler does not answer, having been given the time to start."""
        return self._heartbeat.out

    @property
    def life(self) -> str | None:
        """Of the scheduler's last answer; another one when it was started again. None before the first."""
        return self._heartbeat.life

    async def place(self, turn: TurnFacts) -> Placement:
        """Wait until the turn may go somewhere; then `finish` it, whatever becomes of it.

        Raises:
            Exception: what `fail` was given.
        """
        while not self.out:
            self._raise_if_failed()
            number = next(self._numbers)
            placement = await self._place_there(number, turn)
            if placement is None:
                break
            if number in self._placed:
                return placement._replace(ticket=number)
            await asyncio.sleep(_AGAIN_S)
        return await self._place_here(turn)

    def finish(self, ticket: int, outcome: Outcome | None) -> None:
        """The placed turn is over; without outcome it failed or was cancelled. Once per placement.

        Raises:
            ValueError: the ticket is not running.
        """
        placed = self._placed.pop(ticket, None)
        if placed is None:
            raise ValueError(f"ticket {ticket} is not running, so that it cannot finish")
        if placed.life is None:
            self._here.finish(placed.ticket, outcome)
        else:
            self._running[placed.replica] -= 1
            self._finish_there(placed.ticket, placed.life, outcome)

    def begin_step(self, trajectories: int) -> None:
        """A new step of this many trajectories starts; earlier ones are over."""
        self._here.begin_step(trajectories)
        self._tell("begin_step", trajectories)

    def end(self, trajectory: str) -> None:
        """There will be no further turn of this trajectory."""
        self._here.end(trajectory)
        self._tell("end", trajectory)

    def lost(self, replica: int) -> None:
        """What the replica held is gone."""
        self._here.lost(replica)
        self._tell_of_replicas()
        self._tell("lost", replica)

    def running_on(self, replica: int) -> int:
        """Turns placed on this replica and not finished, counted from when this side took the placement."""
        return self._here.running_on(replica) + self._running[replica]

    def pump(self) -> None:
        """The replicas may have changed."""
        self._here.pump()
        self._tell_of_replicas()

    def fail(self, error: Exception) -> None:
        """Nothing will be placed any more; whoever waits is told."""
        self._failure = error
        for waiting in self._waiting.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(error)
        self._here.fail(error)

    async def state(self) -> State | None:
        """What the scheduler's policy learned; None where there is nothing, or it does not answer."""
        try:
            async with asyncio.timeout(_STATE_S):
                return await self._link.call("state")
        except (UnreachableError, TimeoutError) as error:
            _log.warning("what placement learned cannot be saved: %s", first_line(error))
            return None

    async def stop(self) -> None:
        """Ask nothing any more, and let go of the scheduler."""
        await self._heartbeat.stop()
        await asyncio.sleep(0)  # calls that were just sent are awaited first
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._here.stop()
        await self._link.stop()

    def take_outages(self) -> Outages:
        """What was done without the scheduler since this was asked last."""
        return self._heartbeat.take_outages()

    # --- one turn ------------------------------------------------------------------------

    async def _place_there(self, number: int, turn: TurnFacts) -> Placement | None:
        """The scheduler's placement, in the books if it can be taken; None where there is none to come."""
        waiting = _Waiting(turn, asyncio.get_running_loop().create_future())
        self._waiting[number] = waiting
        try:
            self._tell_of_replicas()
            self._ask(number)
            placement = await waiting.answer
            if placement is not None and self._admits(placement.replica):
                self._placed[number] = _Placed(placement.replica, waiting.life, number)
                self._running[placement.replica] += 1
            return placement
        finally:
            del self._waiting[number]
            if number not in self._placed and waiting.life is not None:
                self._finish_there(number, waiting.life, None)

    async def _place_here(self, turn: TurnFacts) -> Placement:
        self._raise_if_failed()
        placement = await self._here.place(turn)
        self._heartbeat.outages.fallbacks += 1
        number = next(self._numbers)
        self._placed[number] = _Placed(placement.replica, None, placement.ticket)
        self._heartbeat.start()
        return placement._replace(ticket=number)

    def _ask(self, number: int) -> None:
        """Send a turn there; once more where nobody knows whether it arrived."""
        self._heartbeat.start()
        if (life := self._heartbeat.answering) is not None:
            waiting = self._waiting[number]
            waiting.life, waiting.asked = life, self._heartbeat.beats
            call = self._link.call("place", life, self._name, number, waiting.turn)
            self._keep(self._take_answer(waiting, life, call))

    async def _take_answer(self, waiting: _Waiting, life: str, call: Awaitable[Placement | None]) -> None:
        placement, reason = None, ""
        try:
            placement = await call
        except (UnreachableError, OtherLifeError) as error:
            self._heartbeat.doubt(life, error)
            return
        except Exception as error:  # of the policy; for this turn there is no scheduler
            reason = first_line(error)
        if life == waiting.life and not waiting.answer.done():
            self._heartbeat.outages.reason = reason or self._heartbeat.outages.reason
            waiting.answer.set_result(placement)

    def _take_back(self) -> None:
        """The scheduler is out: whoever waits there is placed here."""
        for waiting in self._waiting.values():
            if not waiting.answer.done():
                waiting.answer.set_result(None)

    def _admits(self, replica: int) -> bool:
        """Whether a turn may go there now, whatever was true when that was decided."""
        return any(facts.replica == replica and facts.healthy for facts in self._replicas() or ())

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- what the scheduler has to hear --------------------------------------------------

    def _finish_there(self, number: int, life: str, outcome: Outcome | None) -> None:
        if life == self._heartbeat.life:  # else the books that it stood in are gone
            self._tell("finish", number, outcome, lasts=False)

    def _tell(self, method: str, *arguments: Any, lasts: bool | None = None) -> None:
        """Have the scheduler hear this; where it does not answer, when it does again, in whatever life."""
        answers = self._heartbeat.answering is not None
        lasts = not answers if lasts is None else lasts
        self._outbox.tell(method, *arguments, beat=self._heartbeat.beats if answers else None, lasts=lasts)
        self._heartbeat.start()

    def _tell_of_replicas(self) -> None:
        """Have the scheduler know the replicas as they are. One that does not answer is told later."""
        facts = self._replicas()
        if self._told != (facts,) and self._heartbeat.answering is not None:
            self._told = (facts,)
            self._tell("set_replicas", facts)

    def _send(self, word: int, method: str, arguments: tuple[Any, ...]) -> None:
        life = self._heartbeat.answering
        assert life is not None
        call = self._link.call(method, life, self._name, word, *arguments)
        self._keep(self._take_receipt(word, life, call))

    async def _take_receipt(self, word: int, life: str, call: Awaitable[None]) -> None:
        try:
            await call
        except Exception as error:
            self._heartbeat.doubt(life, error)
        else:
            if life == self._heartbeat.life:
                self._outbox.acknowledge(word)

    # --- whether it is there -------------------------------------------------------------

    def _ping(self) -> Awaitable[Pulse]:
        oldest = min([*self._waiting, *self._placed, next(self._numbers)])
        return self._link.call("ping", self._name, oldest)

    def _matters(self) -> bool:
        """Whether the scheduler is to be asked; in a refit too, as one that starts now has to hear of it."""
        return bool(self._waiting or self._placed or self._outbox or self._replicas() is None)

    def _hear(self, pulse: Pulse, beat: int, first: bool) -> None:
        """It is there: send again what it should have heard before this beat; a new life knows nothing."""
        if first:
            self._told = None
            self._outbox.begin_life()
            for waiting in self._waiting.values():
                waiting.asked = -1
        self._tell_of_replicas()
        self._outbox.send_again(pulse, beat, self._heartbeat.beats)
        for number, waiting in self._waiting.items():
            if waiting.asked <= beat and number not in pulse.waiting and not waiting.answer.done():
                self._ask(number)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this beside; the loop itself holds tasks weakly."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
