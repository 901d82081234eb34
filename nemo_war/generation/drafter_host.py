"""What a host asks of the drafter in its engine, in whatever way it reaches the engine's worker."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from nemo_war import snapshot
from nemo_war.config import HistoryConfig
from nemo_war.generation.memory_file import memory_file
from nemo_war.speculative.archive import SUFFIX


class DrafterHost(ABC):
    """The methods of `extension.WarExtension`, for an engine that drafts, and one that does not.

    Attributes:
        speculates: whether there is a drafter; without one there is nothing to do or to tell.
    """

    def __init__(self, number: int, speculates: bool) -> None:
        self._number = number
        self.speculates = speculates

    @abstractmethod
    async def call(self, method: str, *arguments: Any) -> Any:
        """A worker extension method's answer. Every rank is asked; rank 0 is the output rank at PP=1."""

    async def advance_epoch(self, epoch: int) -> None:
        """What is generated from here on is of this policy epoch."""
        if self.speculates:
            await self.call("war_advance_epoch", epoch)

    async def restore_history(self, history: HistoryConfig) -> None:
        """Start with the history of an earlier run, where the configuration names one."""
        if self.speculates and history.restore is not None:
            await self.call("war_restore_history", str(history.restore), history.empty_if_damaged)

    async def save_history(self, folder: str) -> None:
        """Keep the history in a file of this replica's own in a folder that exists."""
        if self.speculates:
            await self.call("war_save_history", self._stem(folder) + SUFFIX)

    async def save_state(self, folder: str) -> str | None:
        """Write all that the drafter learned into files of this replica's own; return why that failed."""
        if not self.speculates:
            return None
        return await self.call("war_save_state", self._stem(folder))

    async def restore_state(self, folder: str) -> str | None:
        """Go on with what a replica of this number wrote there, if one did; return why that failed."""
        stem = self._stem(folder)
        if not self.speculates or not os.path.exists(stem + snapshot.SUFFIX):
            return None
        return await self.call("war_restore_state", stem)

    def _stem(self, folder: str) -> str:
        return f"{folder}/replica-{self._number}"

    async def export_history(self, lengths: dict[str, int] | None = None) -> np.ndarray | None:
        """What the drafter remembers of these trajectories, for other replicas.

        Args:
            lengths: by trajectory, how many of its tokens; None: all that is remembered.

        Returns:
            [bytes] uint8 array that `import_history` takes; None if there is nothing to tell.
        """
        if not self.speculates:
            return None
        with memory_file(f"history-{self._number}") as file:
            told = await self.call("war_export_history", file.path, lengths)
            return file.read() if told else None

    async def import_history(self, blob: Any) -> int:
        """Learn what another replica exported.

        Args:
            blob: [bytes] uint8 array, a view into Ray's object store.

        Returns:
            How many trajectories were news.
        """
        if not self.speculates:
            return 0
        with memory_file(f"history-{self._number}") as file:
            file.write(blob)
            return int(await self.call("war_import_history", file.path))

    async def reliability(self) -> list[tuple[float, float, int]]:
        """How predicted acceptance compares with what was accepted, since the start."""
        return await self.call("war_reliability") if self.speculates else []

    async def statistics(self) -> dict[str, Any]:
        """The drafter's counters since the start; empty for a stock engine."""
        return await self.call("war_statistics") if self.speculates else {}

    async def commit(self, lengths: dict[str, int]) -> None:
        """Final lengths of trajectories that ended, in tokens."""
        if self.speculates:
            await self.call("war_commit", lengths)

    async def clear_history(self) -> None:
        """Start from an empty history, for repeats that must not help each other."""
        if self.speculates:
            await self.call("war_clear_history")

    async def enable_drafting(self, enabled: bool) -> None:
        """Switch drafting on or off while the history keeps learning."""
        if self.speculates:
            await self.call("war_enable_drafting", enabled)
