"""How functions of arrays are compiled, the drafter's and those of placement."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.cpu import CPUTargetOptions

_MODULES = ("kernel", "speculative/arena", "speculative/calibration", "speculative/index", "routing/cost")
"""The modules that hold kernels, and this one."""


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function of arrays; on disk where that is possible, without the GIL.

    Kernels allocate nothing (one that would does not compile), so they need no counting of
    references, which numba otherwise does at every view of a row: that cost two thirds of the time.
    `_nrt` is not documented; a numba that does not know it compiles slower code of the same meaning.

    Numba notices a stale cache file by the time stamp of the one module the function
    stands in, but kernels call kernels of other modules here, which are compiled into
    them: the stamp is made of all of these.
    """
    options = {"nogil": True, "_nrt": False} if hasattr(CPUTargetOptions, "_nrt") else {"nogil": True}
    try:
        dispatcher = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no writable directory for the cache
        return numba.njit(**options)(function)
    cache_file = getattr(dispatcher._cache, "_cache_file", None)
    if cache_file is not None:
        cache_file._source_stamp = _stamp()
    return dispatcher


@cache
def _stamp() -> tuple[tuple[float, int], ...]:
    """Time and size of the modules that hold kernels; an edit elsewhere must not compile them again."""
    stats = [(Path(__file__).parent / f"{name}.py").stat() for name in _MODULES]
    return tuple((stat.st_mtime, stat.st_size) for stat in stats)
