"""The way to a scheduler in another process."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol


class UnreachableError(Exception):
    """The scheduler is dead, away, or does not answer; it may have got the call or not."""


class Link(Protocol):
    """The way to one scheduler, in whatever process it is."""

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """Send a call, now and after all that were sent before; its answer can be awaited.

        Raises:
            UnreachableError: (the awaited answer) see there.
            Exception: (the awaited answer) what the method raised.
        """

    async def restart(self) -> None:
        """End the scheduler, which does not answer, and start another one, unless somebody did."""

    async def stop(self) -> None:
        """There will be no further call."""
