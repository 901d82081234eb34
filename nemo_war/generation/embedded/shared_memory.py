"""Files in shared memory that processes leave behind when they are killed.

vLLM's message queues lie there, of which a killed process unlinks none, and a registration
of Intel's OpenMP, one for each process.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

import psutil

_FOLDER = Path("/dev/shm")
_QUEUE = re.compile(r"/dev/shm/psm_\w+")
"""Names that Python's `multiprocessing` makes up: only the process that made one up, and its kin, use it."""


def mapped(processes: Iterable[psutil.Process]) -> set[Path]:
    """The queues that these processes have open."""
    found: set[Path] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            found |= {Path(name) for name in _QUEUE.findall(Path(f"/proc/{process.pid}/maps").read_text())}
    return found


def registrations(processes: Iterable[psutil.Process]) -> set[Path]:
    """Where Intel's OpenMP says that it is loaded in these processes."""
    return {_FOLDER / f"__KMP_REGISTERED_LIB_{process.pid}_{os.getuid()}" for process in processes}


def remove(files: Iterable[Path]) -> None:
    """Remove those that are there still, once nobody uses them."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()
