"""How NeMo-RL's workers, whose environments are their own, find this package: PYTHONPATH is passed on."""

from __future__ import annotations

import os
from pathlib import Path

_OWN = Path(__file__).resolve().parents[3]
"""The folder that this package was imported from."""


def for_workers(known: str, folder: Path = _OWN) -> str:
    """PYTHONPATH for workers: with the package's folder first, where that is a checkout or holds it alone.

    An environment's own folder must not be on it: its other packages would come before those of the
    worker's environment. docs/guides/install-on-a-cluster.md says what to do then.

    Args:
        known: PYTHONPATH as it is.
        folder: the one with the package.
    """
    entries = [entry for entry in known.split(os.pathsep) if entry]
    if folder.name not in ("site-packages", "dist-packages") and str(folder) not in entries:
        entries.insert(0, str(folder))
    return os.pathsep.join(entries)
