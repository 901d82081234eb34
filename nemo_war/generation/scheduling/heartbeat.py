"""Whether a scheduler in another process is there.

A turn may rightly wait there for minutes, so that its waiting says nothing. While there is
anything to wait for, the scheduler is asked every second. One that does not answer in time, or
whose process died, is *out*; it is asked on, ended and started again where it stays silent,
and back with its next answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from nemo_war.generation.scheduling.link import Link, UnreachableError
from nemo_war.generation.scheduling.scheduler import OtherLifeError, Pulse

_SLICES = 4
"""Parts of a deadline. What keeps this process from looking, such as a training step, takes one at most."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for what.

    Attributes:
        beat_s: between two questions whether it is there.
        deadline_s: for their answer. One slow core is busy for that long with 8,000 turns that come at once.
        start_s: for the first answer of all; a process has to start.
        restart_s: how long it may be silent before it is ended and started again, and twice as long each
            further time. One that is slow comes back by itself and still knows what is where.
    """

    beat_s: float = 1.0
    deadline_s: float = 2.0
    start_s: float = 60.0
    restart_s: float = 30.0


@dataclass(slots=True)
class Outages:
    """What was done without the scheduler.

    Attributes:
        fallbacks: turns that were placed without it.
        outages: times it went away.
        seconds_out: how long it was away, all outages together.
        reason: why the last of these turns were placed without it.
    """

    fallbacks: int = 0
    outages: int = 0
    seconds_out: float = 0.0
    reason: str = ""


class Heartbeat:
    """Asks while that matters, and counts outages.

    Attributes:
        life: of the last answer; None before the first.
        beats: times it was asked.
        outages: since they were taken last.
    """

    def __init__(
        self,
        link: Link,
        ping: Callable[[], Awaitable[Pulse]],
        matters: Callable[[], bool],
        heard: Callable[[Pulse, int, bool], None],
        went: Callable[[], None],
        clock: Callable[[], float],
        patience: Patience,
    ) -> None:
        """Ask nothing yet.

        Args:
            link: for restarts.
            ping: asks whether it is there.
            matters: whether to go on asking.
            heard: told of each answer, the beat it belongs to, and whether it is the first of a life.
            went: told when the scheduler is out.
            clock: seconds.
            patience: how long to wait for what.
        """
        self.life: str | None = None
        self.beats = 0
        self.outages = Outages()
        self._link, self._ping, self._matters = link, ping, matters
        self._heard, self._went = heard, went
        self._clock, self._patience = clock, patience
        self._out_since: float | None = None
        self._restart_at = self._restart_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    @property
    def out(self) -> bool:
        """Whether the scheduler does not answer, having been given the time to start."""
        return self._out_since is not None

    @property
    def answering(self) -> str | None:
        """The life that answers; None where none does."""
        return None if self.out or self._stopped else self.life

    @property
    def asks(self) -> bool:
        """Whether it goes on asking."""
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """See to it that the scheduler is asked, for as long as that matters."""
        if not self._stopped and not self.asks:
            self._task = asyncio.get_running_loop().create_task(self._keep_asking())

    async def stop(self) -> None:
        """Ask no more."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def doubt(self, life: str, error: Exception) -> None:
        """A call of that life failed; a later one need not care. If that one answered, `ping` will tell."""
        if life == self.life and not isinstance(error, OtherLifeError):
            self._go_out(error)

    def take_outages(self) -> Outages:
        """What was done without the scheduler since this was asked last."""
        self._count_seconds()
        taken, self.outages = self.outages, Outages(reason=self.outages.reason if self.out else "")
        return taken

    async def _keep_asking(self) -> None:
        while self.out or self._matters():
            starting = self.life is None and not self.out
            deadline_s = self._patience.start_s if starting else self._patience.deadline_s
            beat, self.beats = self.beats, self.beats + 1
            try:
                pulse = await _in_time(self._ping(), deadline_s)
            except Exception as error:
                self._go_out(error)
                await self._revive()
            else:
                self._come_back(pulse, beat)
            await asyncio.sleep(self._patience.beat_s)

    def _come_back(self, pulse: Pulse, beat: int) -> None:
        first, self.life = pulse.life != self.life, pulse.life
        self._count_seconds()
        self._out_since = None
        self._heard(pulse, beat, first)

    def _go_out(self, error: Exception) -> None:
        if self.out:
            return
        self._out_since = self._clock()
        self._restart_s = self._patience.restart_s
        self._restart_at = self._out_since + self._restart_s
        self.outages.outages += 1
        self.outages.reason = first_line(error)
        self._went()
        self.start()

    def _count_seconds(self) -> None:
        if self._out_since is not None:
            now = self._clock()
            self.outages.seconds_out += now - self._out_since
            self._out_since = now

    async def _revive(self) -> None:
        if self._clock() >= self._restart_at:
            self._restart_s *= 2
            self._restart_at = self._clock() + self._restart_s
            with contextlib.suppress(Exception):  # turns go on as they do
                await self._link.restart()


async def _in_time(ping: Awaitable[Pulse], deadline_s: float) -> Pulse:
    """The answer, if it comes in time.

    Raises:
        UnreachableError: it did not.
    """
    answer = asyncio.ensure_future(ping)
    try:
        for _ in range(_SLICES):
            done, _ = await asyncio.wait({answer}, timeout=deadline_s / _SLICES)
            if done:
                return answer.result()
    finally:
        answer.cancel()
    raise UnreachableError(f"it did not answer within {deadline_s:g} s")


def first_line(error: BaseException) -> str:
    """An error in one line."""
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
