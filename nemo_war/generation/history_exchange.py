"""The shell that carries out what `speculative.exchange` decides between a fleet's replicas.

A batch is exported once, put into the object store once, and every replica that is to learn
it reads it from there, so that a node holds one copy however many of its replicas do. What
fails or takes too long costs sharing only: it is counted, and comes again with the next exchange.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_war.config import ExchangeConfig
from nemo_war.metadata import TurnMetadata
from nemo_war.speculative.exchange import Batch, Exchange

_log = logging.getLogger(__name__)


class Ask(Protocol):
    """Calls a method of a replica; a shared object among the arguments stands for its value."""

    async def __call__(self, number: int, method: str, *arguments: Any) -> Any:
        """The method's result."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What one exchange did; see `telemetry.records.ExchangeRecord`."""

    batches: int
    tokens: int
    seconds: float
    failed: int
    dropped: int


Report = Callable[[str, Exchanged], None]
"""Told why there was an exchange (`live`, `step` or `seed`), and what it did."""


class HistoryExchange:
    """Replicas that learn from each other. One event loop drives it."""

    def __init__(
        self,
        config: ExchangeConfig,
        replicas: Iterable[int],
        ask: Ask,
        share: Callable[[Any], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is known yet.

        Args:
            config: when to exchange, and the bounds.
            replicas: their numbers.
            ask: for `export_history` and `import_history` of `Replica`.
            share: puts an export where all replicas can read it.
            clock: seconds.
        """
        self._numbers = numbers = tuple(replicas)
        self._config, self._ask, self._share, self._clock = config, ask, share, clock
        self._on = config.when != "off" and len(numbers) > 1
        self._books = Exchange(numbers, config.max_tokens_per_batch)
        self._report: Report = lambda when, done: None
        self._dropped = 0
        self._has_warned = False

    def placed(self, turn: TurnMetadata, replica: int) -> None:
        """A turn goes to this replica."""
        if self._on and turn.learn:
            self._books.placed(turn.trajectory, turn.group, replica)

    def finished(self, turn: TurnMetadata, replica: int, tokens: int) -> None:
        """A turn finished there; its trajectory is so many tokens long now."""
        if self._on and turn.learn:
            self._books.finished(turn.trajectory, turn.group, replica, tokens)

    def ended(self, trajectory: str, tokens: int) -> None:
        """A trajectory is over, with this final length."""
        self._books.ended(trajectory, tokens)

    def lost(self, replica: int) -> None:
        """The replica and what it knew are gone; `seed` it when it is back."""
        self._books.lost(replica)

    def cleared(self, serving: Iterable[int]) -> None:
        """All histories were emptied, of these replicas; the others are lost."""
        self._books.clear()
        for replica in set(self._numbers).difference(serving):
            self._books.lost(replica)

    @asynccontextmanager
    async def step(self, report: Report) -> AsyncIterator[None]:
        """A step's turns run in the block: exchange those that finish, if that is configured.

        Args:
            report: told of each exchange, from now on until the next step.
        """
        self._report = report
        if not self._on or self._config.when != "live":
            yield
            return
        task = asyncio.create_task(self._keep_exchanging())
        try:
            yield
        finally:
            task.cancel()  # what is on its way comes again at the end of the step
            await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    async def end_step(self) -> Exchanged | None:
        """Everything to every replica that lacks it; None if there is nothing to tell."""
        return await self._carry_out("step", self._books.end_step())

    async def seed(self, replica: int) -> Exchanged | None:
        """A replica is back, empty for all that is known: what its peers know goes there; None if nothing."""
        return await self._carry_out("seed", self._books.seed(replica) if self._on else [])

    async def _keep_exchanging(self) -> None:
        while True:
            await asyncio.sleep(self._config.interval_s)
            await self._carry_out("live", self._books.live())

    async def _carry_out(self, when: str, batches: list[Batch]) -> Exchanged | None:
        """All at once; each replica does one after the other anyway."""
        started, dropped = self._clock(), self._books.dropped - self._dropped
        self._dropped += dropped
        if not batches and not dropped:
            return None
        deadline = asyncio.get_running_loop().time() + self._config.timeout_s
        complete = await asyncio.gather(*(self._carry(batch, deadline) for batch in batches))
        done = Exchanged(
            batches=len(batches),
            tokens=sum(batch.tokens for batch in batches),
            seconds=self._clock() - started,
            failed=complete.count(False),
            dropped=dropped,
        )
        self._report(when, done)
        return done

    async def _carry(self, batch: Batch, deadline: float) -> bool:
        """Bring a batch to its targets; whether it reached all of them by then."""
        missing = set(batch.targets)
        try:
            async with asyncio.timeout_at(deadline):
                blob = await self._ask(batch.source, "export_history", batch.lengths)
                if blob is None:
                    missing.clear()  # forgotten there meanwhile: to ask again would bring no more
                    return True
                shared = self._share(blob)
                del blob
                await asyncio.gather(
                    *(self._deliver(batch, target, shared, missing) for target in batch.targets)
                )
        except Exception as error:
            self._warn(f"from replica {batch.source}", error)
        finally:
            for target in missing:
                self._books.failed(batch, target)
        return not missing

    async def _deliver(self, batch: Batch, target: int, shared: Any, missing: set[int]) -> None:
        try:
            await self._ask(target, "import_history", shared)
        except Exception as error:
            self._warn(f"to replica {target}", error)
            return
        missing.discard(target)
        self._books.arrived(batch, target)

    def _warn(self, way: str, error: Exception) -> None:
        if not self._has_warned:
            reason = str(error) or type(error).__name__
            _log.warning("history %s was not shared: %s (logged once, then counted)", way, reason)
        self._has_warned = True
