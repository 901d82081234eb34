"""An anonymous file in memory: how large blobs go between a replica and its engine's worker.

The worker is another process, and what vLLM's own calls carry is serialised several times
on the way. A file in memory is written once and read once, and no disk sees it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class MemoryFile:
    """A file that exists while it is open; see `memory_file`.

    Attributes:
        path: under which any process of the same user can open it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"

    def write(self, blob: Any) -> None:
        """Append anything that has a contiguous buffer."""
        view = memoryview(blob).cast("B")
        while view:
            view = view[os.write(self._descriptor, view) :]

    def read(self) -> np.ndarray:
        """All that was written, whoever wrote it, as uint8[bytes]."""
        return np.fromfile(self.path, np.uint8)


@contextmanager
def memory_file(name: str) -> Iterator[MemoryFile]:
    """An empty one, gone with the block; the name is for people who look at the process."""
    descriptor = os.memfd_create(name)
    try:
        yield MemoryFile(descriptor)
    finally:
        os.close(descriptor)
