"""What a refit took, and how that is summed up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemo_war.generation.refit import Phase, Transition


@dataclass(frozen=True, slots=True)
class RefitTiming:
    """One refit, in seconds.

    Attributes:
        total: of `Fleet.refit`.
        quiet: until nothing ran any more; with `drain` that is how long the turns took to finish.
        load: of the slowest replica's `load_weights`, from the call's arrival to its answer.
        reset: of the phase that resets caches and raises the epoch.
        in_flight: turns that ran when it began.
    """

    total: float
    quiet: float
    load: float
    reset: float
    in_flight: int

    @property
    def overhead(self) -> float:
        """All that is not loading."""
        return self.total - self.load

    @property
    def overhead_after_quiet(self) -> float:
        """The same, but for the wait until nothing ran."""
        return self.overhead - self.quiet


class Stopwatch:
    """Told of a fleet's transitions: how long it was in each phase of the refit that ran last."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._since = 0.0

    def record(self, transition: Transition) -> None:
        """One transition, as it is made; those of single replicas say nothing of the fleet's phase."""
        if transition.replica is not None:
            return
        now = time.perf_counter()
        if transition.before is Phase.SERVING:
            self._seconds.clear()
        else:
            self._seconds[transition.before] = now - self._since
        self._since = now

    def seconds(self, phase: Phase) -> float:
        return self._seconds.get(phase, 0.0)


def summary(refits: Sequence[RefitTiming], baselines: Sequence[float]) -> dict[str, Any]:
    """Medians, and [least, most] where they are read.

    Args:
        refits: of one kind.
        baselines: seconds to load the same weights on all replicas at once, in the same run.
    """
    refit, baseline = _median(each.total for each in refits), _median(baselines)
    return {
        "refits": len(refits),
        "in_flight": _median(each.in_flight for each in refits),
        "load_s": _median(each.load for each in refits),
        "load_range_s": _range(each.load for each in refits),
        "refit_s": refit,
        "refit_range_s": _range(each.total for each in refits),
        "quiet_s": _median(each.quiet for each in refits),
        "reset_s": _median(each.reset for each in refits),
        "overhead_s": _median(each.overhead for each in refits),
        "overhead_range_s": _range(each.overhead for each in refits),
        "overhead_share": _median(each.overhead / each.total for each in refits),
        "overhead_after_quiet_s": _median(each.overhead_after_quiet for each in refits),
        "overhead_after_quiet_share": _median(each.overhead_after_quiet / each.total for each in refits),
        "baseline_s": baseline,
        "baseline_range_s": _range(baselines),
        "over_baseline_s": round(refit - baseline, 4),
    }


def _median(values: Any) -> float:
    return round(statistics.median(values), 4)


def _range(values: Any) -> list[float]:
    values = list(values)
    return [round(min(values), 4), round(max(values), 4)]
