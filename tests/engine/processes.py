"""Processes that a test started, known by a mark in their environment."""

from __future__ import annotations

import os
import time
from pathlib import Path


def marked(mark: Path) -> list[int]:
    """Processes with this mark: those a test started, and what they started."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and str(mark).encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return [process for process in found if process != os.getpid()]


def wait_until_gone(mark: Path, patience_s: float = 30) -> list[int]:
    """Those that are left when none should be."""
    deadline = time.monotonic() + patience_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left
