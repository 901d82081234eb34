"""A small disk of its own, that can be full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_FILLER = "filler"
_PIECE = 1 << 12


class Disk:
    """A file system in memory; see `disk`.

    Attributes:
        folder: where it is mounted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self) -> None:
        """Leave no room, down to the last page."""
        with contextlib.suppress(OSError), open(self.folder / _FILLER, "ab", buffering=0) as file:
            while True:
                file.write(b"\0" * _PIECE)

    def free(self) -> None:
        """Make room again."""
        (self.folder / _FILLER).unlink(missing_ok=True)


@contextlib.contextmanager
def disk(folder: Path, size: int) -> Iterator[Disk]:
    """One of so many bytes, mounted on a folder that is made.

    Raises:
        RuntimeError: this user may not mount one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", os.fspath(folder)], capture_output=True
    )
    if mounted.returncode:
        raise RuntimeError(
            f"a small disk cannot be mounted here ({mounted.stderr.decode().strip()}): be root"
        )
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", os.fspath(folder)], check=True)
