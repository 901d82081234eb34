"""RefitCycle: the weights of a fleet change, and nothing of the old policy is served.

    serving ──begin──▶ draining | pausing ──quiet──▶ updating ──updated──▶ verifying ──verified──▶ serving
                              └──────────────┴───────────┴── fail, deadline ──▶ failed

The machine is pure: the shell around it awaits replicas and reports what they said;
the clock is injected. Three rules are kept here and nowhere else:

* no turn is admitted outside `serving`;
* the policy epoch rises only when *every* replica loaded the same bytes and itself
  said that it reset its caches;
* `failed` is final. A fleet of which one part has new weights and the other old ones,
  or stale KV, must not serve on by itself; the step fails and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum


class Phase(StrEnum):
    """Where the cycle stands."""

    SERVING = "serving"
    DRAINING = "draining"
    PAUSING = "pausing"
    UPDATING = "updating"
    VERIFYING = "verifying"
    FAILED = "failed"


_TRANSITIONS = {
    Phase.SERVING: {Phase.DRAINING, Phase.PAUSING},
    Phase.DRAINING: {Phase.UPDATING, Phase.FAILED},
    Phase.PAUSING: {Phase.UPDATING, Phase.FAILED},
    Phase.UPDATING: {Phase.VERIFYING, Phase.FAILED},
    Phase.VERIFYING: {Phase.SERVING, Phase.FAILED},
    Phase.FAILED: set(),
}
"""Every transition there is. None leads out of `failed`, and `serving` cannot fail: nothing is at stake."""


class RefitError(Exception):
    """The refit did not complete; the fleet must not serve."""


class RefitCycle:
    """One fleet's refits, one after another.

    Attributes:
        phase: current phase.
        epoch: policy epoch, the count of refits that completed.
        reason: why the cycle failed; empty otherwise.
    """

    def __init__(
        self,
        replicas: Iterable[int],
        *,
        in_flight: str,
        quiet_timeout_s: float,
        update_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._replicas = frozenset(replicas)
        if not self._replicas:
            raise ValueError("a refit cycle needs at least one replica")
        self._quieting = Phase.PAUSING if in_flight == "pause" else Phase.DRAINING
        self._timeouts = {
            self._quieting: quiet_timeout_s,
            Phase.UPDATING: update_timeout_s,
            Phase.VERIFYING: update_timeout_s,
        }
        self._clock = clock
        self.phase = Phase.SERVING
        self.epoch = 0
        self.reason = ""
        self._digest = ""
        self._waiting: set[int] = set()
        self._deadline = float("inf")

    @property
    def admits(self) -> bool:
        """Whether turns may start."""
        return self.phase is Phase.SERVING

    @property
    def waiting_for(self) -> frozenset[int]:
        """Replicas that have not reported in this phase."""
        return frozenset(self._waiting)

    def begin(self, digest: str) -> None:
        """Stop admitting; `digest` names the weights that every replica must end up with."""
        self._enter(self._quieting)
        self._digest = digest

    def quiet(self, replica: int) -> None:
        """The replica has no running turn any more, or has frozen them."""
        self._report(replica, self._quieting, Phase.UPDATING)

    def updated(self, replica: int, digest: str) -> None:
        """The replica loaded weights of this digest."""
        if self.phase is Phase.UPDATING and digest != self._digest:
            self.fail(f"replica {replica} loaded weights {digest[:12]}, not {self._digest[:12]}")
            return
        self._report(replica, Phase.UPDATING, Phase.VERIFYING)

    def verified(self, replica: int, *, kv_reset: bool) -> None:
        """The replica answered whether its KV caches were reset; the last yes raises the epoch."""
        if self.phase is Phase.VERIFYING and not kv_reset:
            self.fail(f"replica {replica} did not reset its prefix cache")
            return
        if self._report(replica, Phase.VERIFYING, Phase.SERVING):
            self.epoch += 1

    def fail(self, reason: str) -> None:
        """Give up; the first reason stands."""
        if self.phase is not Phase.FAILED:
            self._enter(Phase.FAILED)
            self.reason = reason

    def check_deadline(self) -> None:
        """Fail if the current phase has taken too long."""
        if self._clock() > self._deadline:
            late = ", ".join(map(str, sorted(self._waiting)))
            self.fail(f"replica {late} still {self.phase} after {self._timeouts[self.phase]:g} s")

    def _report(self, replica: int, during: Phase, then: Phase) -> bool:
        """Tick a replica off; True when it was the last one and the phase changed."""
        if self.phase is Phase.FAILED:
            return False  # a late answer of a replica that was not the one that failed
        if self.phase is not during or replica not in self._waiting:
            raise RefitError(f"replica {replica} reported {during} while the fleet is {self.phase}")
        self._waiting.remove(replica)
        if self._waiting:
            return False
        self._enter(then)
        return True

    def _enter(self, phase: Phase) -> None:
        if phase not in _TRANSITIONS[self.phase]:
            raise RefitError(
                f"no transition from {self.phase} to {phase}" + (f": {self.reason}" if self.reason else "")
            )
        self.phase = phase
        self._waiting = set(self._replicas) if phase in self._timeouts else set()
        self._deadline = self._clock() + self._timeouts.get(phase, float("inf"))
