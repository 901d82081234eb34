"""How long to fuzz, and with which seeds: a case is its seed, so that any failure can be replayed."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SHORT_S = 2.0
LONG_S = float(os.environ.get("NEMO_WAR_FUZZ_S", "1800"))
_SEED = os.environ.get("NEMO_WAR_FUZZ_SEED")

BUDGETS = pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(SHORT_S, id="short", marks=pytest.mark.timeout(600)),
        pytest.param(LONG_S, id="long", marks=[pytest.mark.full, pytest.mark.timeout(LONG_S + 600)]),
    ],
)
"""Each fuzz test twice: for two seconds among the unit tests, and for as long as `make test-full` allows."""


def seeds(seconds: float) -> Iterator[int]:
    """Seeds until the time is up; one at least. A short run always begins with the same ones.

    `NEMO_WAR_FUZZ_SEED` names the one seed that is wanted again.
    """
    if _SEED is not None:
        yield int(_SEED)
        return
    seed = 0 if seconds <= SHORT_S else random.SystemRandom().randrange(1 << 20) << 20
    started, first = time.monotonic(), seed
    while seed == first or time.monotonic() - started < seconds:
        yield seed
        seed += 1
    took = time.monotonic() - started
    print(f"\nfuzzed seeds {first} to {seed - 1} in {took:.0f} s, {(seed - first) / took:.1f} a second")


@contextmanager
def replayable(seed: int) -> Iterator[random.Random]:
    """The randomness of a case; whatever fails in the block says how to see it again."""
    try:
        yield random.Random(seed)
    except Exception as error:
        raise AssertionError(f"NEMO_WAR_FUZZ_SEED={seed} replays this: {error!r}") from error
