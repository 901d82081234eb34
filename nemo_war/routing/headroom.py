"""Room in the caches that newcomers leave free, so that those who are there can grow.

A cache that is filled to the brim with trajectories that grow must pause some of them, and
those compute their context again when they return. Room that is kept free serves nobody
meanwhile. Which is worse depends on how long contexts are and how fast they grow, so that
it is measured: the time that goes into computing again what had been computed.
"""

from __future__ import annotations

import numpy as np

from nemo_war.snapshot import State

_WINDOW_STEPS = 1000
"""Engine steps in whose time it is measured before the room is changed."""
_BEARABLE = 0.1
"""Share of the replicas' time. What one more trajectory adds to the throughput grows slower than what it has
others compute again, so that the best share is small, and not zero. Simulated makespans, without headroom
and with: coding sessions of 45,000 tokens, room for six on a replica, 1105 and 906 s; for three, 1404 and
1307 s; tau-bench, room for a third, 241 and 240 s; for a sixth 294 and 282 s."""
_GAIN = 0.5
"""Change of the room for a share beyond what is bearable, or below."""
_MOST = 0.3
"""Share of the caches that is kept free at most."""


class Headroom:
    """How much of the caches is to be kept free.

    Attributes:
        share: of each cache.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._lost_s = 0.0
        self._since: float | None = None

    def recomputed(self, seconds: float, replicas: int, step_s: float, now: float) -> None:
        """A turn was answered, and took this much prefill of what had been computed before.

        Args:
            seconds: of its replica's time.
            replicas: that serve.
            step_s: seconds of a step of theirs.
            now: the time.
        """
        if self._since is None:
            self._since = now
        self._lost_s += seconds
        elapsed = now - self._since
        if elapsed > _WINDOW_STEPS * step_s:
            excess = self._lost_s / (replicas * elapsed) - _BEARABLE
            self.share = min(_MOST, max(0.0, self.share + _GAIN * excess))
            self._since, self._lost_s = now, 0.0

    def state(self) -> State:
        """What was learned; a measurement that is not over is not."""
        return State({"share": np.array(self.share)})

    def restore(self, state: State) -> None:
        """Go on with what a state learned.

        Raises:
            ValueError: it is no state of headroom, and nothing was changed.
        """
        self.share = float(state.array("share", np.array(0.0), most=_MOST))
