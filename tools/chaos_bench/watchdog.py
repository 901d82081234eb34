"""A run that hangs ends, and says what waits for what."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CoroutineType
from typing import Any

HUNG = 3
"""Exit status of a run that hung."""
_TICK_S = 0.5
_ANSWER_S = 5.0
"""How long the event loop may take to describe itself; it may be what hangs."""


class Watchdog(threading.Thread):
    """Looks whether anything happens, from `start` to `stop`. A thread, as the event loop may be what hangs.

    Attributes:
        patience_s: nothing may happen for so long; may be changed.
        loop: of the run, where it has one.
    """

    def __init__(
        self,
        patience_s: float,
        progress: Callable[[], object],
        describe: Callable[[], str],
        clean_up: Callable[[], None],
        file: Path,
    ) -> None:
        """Watch nothing yet.

        Args:
            patience_s: see the class.
            progress: changes when something happens.
            describe: says where everything stands; called in the event loop.
            clean_up: called before the process ends.
            file: gets the description, too.
        """
        super().__init__(name="watchdog", daemon=True)
        self.patience_s = patience_s
        self.loop: asyncio.AbstractEventLoop | None = None
        self._progress, self._describe, self._clean_up = progress, describe, clean_up
        self._file = file
        self._over = threading.Event()

    def stop(self) -> None:
        """The run is over."""
        self._over.set()

    def run(self) -> None:
        seen, quiet_s, last = self._progress(), 0.0, time.monotonic()
        while not self._over.wait(_TICK_S):
            # A machine that was suspended has not hung for as long.
            quiet_s += min(time.monotonic() - last, 2 * _TICK_S)
            last = time.monotonic()
            if (now := self._progress()) != seen:
                seen, quiet_s = now, 0.0
            elif quiet_s > self.patience_s:
                self._bark()

    def _bark(self) -> None:
        text = f"chaos: nothing has happened for {self.patience_s:g} s; the run hangs\n{self._told()}"
        print(text, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr)
        self._file.write_text(text)
        self._clean_up()
        os._exit(HUNG)

    def _told(self) -> str:
        """What the event loop says of itself, if it does."""
        loop, said, told = self.loop, [], threading.Event()
        if loop is None:
            return "it has not begun"

        def tell() -> None:
            try:
                said.append(f"{self._describe()}\n{waits(loop)}")
            finally:
                told.set()

        try:
            loop.call_soon_threadsafe(tell)
        except RuntimeError:
            return "its event loop is closed"
        told.wait(_ANSWER_S)
        return said[0] if said else "its event loop does not answer"


def waits(loop: asyncio.AbstractEventLoop) -> str:
    """Each task of a loop, and the chain of coroutines down to what it waits for."""
    return "\n".join(sorted(" > ".join(_chain(task.get_coro())) for task in asyncio.all_tasks(loop)))


def _chain(awaited: Any) -> Iterator[str]:
    while isinstance(awaited, CoroutineType):
        frame = awaited.cr_frame
        yield f"{awaited.__qualname__}:{frame.f_lineno if frame else '?'}"
        awaited = awaited.cr_await
    if awaited is not None:
        yield type(awaited).__name__
