"""How much more memory a long run takes."""

from __future__ import annotations

import contextlib
from collections import defaultdict

import numpy as np
import psutil

_WARM_UP = 0.2
"""Share of the samples, from the start, that do not count: caches fill, and allocators find their size."""
_POINTS = 400
"""Samples that a slope is taken from, at most; it takes all pairs."""


class Memory:
    """Resident memory of processes, over the count of faults."""

    def __init__(self) -> None:
        self._samples: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    def sample(self, name: str, process: psutil.Process, faults: int) -> None:
        """How much a process has after so many faults."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._samples[name].append((faults, process.memory_info().rss / 2**20))

    def slopes(self) -> dict[str, float | None]:
        """MiB per 1,000 faults of each process; None where there are too few samples to say."""
        return {name: slope(samples) for name, samples in self._samples.items()}


def slope(samples: list[tuple[float, float]]) -> float | None:
    """The median of the slopes between all pairs of samples (Theil-Sen), per 1,000.

    Single samples that are far off, however far, do not count.
    """
    kept = np.array(samples[int(_WARM_UP * len(samples)) :])
    if len(kept) < 8:
        return None
    kept = kept[np.linspace(0, len(kept) - 1, min(len(kept), _POINTS)).astype(int)]
    first, second = np.triu_indices(len(kept), 1)
    across, up = (kept[second] - kept[first]).T
    different = across > 0
    return round(float(np.median(up[different] / across[different])) * 1000, 2) if different.any() else None
