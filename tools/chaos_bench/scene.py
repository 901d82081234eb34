"""What happens in a fleet, for those who wait for the right moment."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable

from nemo_war.generation.refit import Stage, Transition


class Scene:
    """Told of everything that happens, and tells those who wait.

    Attributes:
        fences: of each replica, when it was fenced off, since `forget`.
        changes: how much has happened; does not rise while all hangs.
        exchange_failed_at, exchange_done_at: when an exchange of history reached not all, and when all.
    """

    def __init__(self) -> None:
        self.fences: defaultdict[int, list[tuple[float, str]]] = defaultdict(list)
        self.changes = 0
        self.exchange_failed_at = self.exchange_done_at = 0.0
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}

    def record(self, transition: Transition) -> None:
        """A replica, or the fleet, has another stage."""
        if transition.after is Stage.FENCED and transition.replica is not None:
            self.fences[transition.replica].append((time.monotonic(), transition.reason))
        self.changed()

    def exchanged(self, failed: bool) -> None:
        """Replicas told each other of their histories."""
        if failed:
            self.exchange_failed_at = time.monotonic()
        else:
            self.exchange_done_at = time.monotonic()
        self.changed()

    def changed(self) -> None:
        """Something else happened. What lasts for a moment only is seen, too."""
        self.changes += 1
        for future, predicate in list(self._waiting.items()):
            if not future.done() and predicate():
                future.set_result(None)

    async def until(self, predicate: Callable[[], bool], patience_s: float) -> None:
        """Wait until something holds, be it for a moment.

        Raises:
            TimeoutError: it does not.
        """
        if predicate():
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = predicate
        try:
            async with asyncio.timeout(patience_s):
                await future
        finally:
            del self._waiting[future]
