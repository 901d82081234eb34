"""What a placement costs, in seconds, on every replica at once.

    own      prefill of what is not cached + the prefill queued before it
             + the trajectory's remaining output at the pace of the batch it joins
    others   that prefill, and the slower pace, for all who run there
    evicted  prefill of what others will have to compute again; the policy adds it

This turn meets what runs now; the trajectory's later turns, which follow it, meet what
usually runs where so many trajectories live. That is what makes a move to an idle replica
worth its prefill, or not. All times come from the replicas' own step-time models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nemo_war.generation.step_time import StepLoad, StepTimeModel

Seconds = np.ndarray
"""float64[replicas]."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Ablations: a term with weight 0 is left out."""

    prefill: float = 1.0
    queue: float = 1.0
    pace: float = 1.0
    others: float = 1.0
    evicted: float = 1.0


class Pace(NamedTuple):
    """A replica's step-time model, as far as placement needs it, in seconds.

    Attributes:
        base: any step.
        request: each request in it.
        token: each token of prefill.
        context: each token of context attended to.
    """

    base: float
    request: float
    token: float
    context: float

    @classmethod
    def of(cls, model: StepTimeModel) -> Pace:
        """Read a model off at the points that matter: one request, a batch, a chunk of prefill."""
        one, batch = StepLoad(1, 1), StepLoad(17, 17)
        chunk = StepLoad(1, 1025)
        base = model.predict(StepLoad(0, 0))
        request = (model.predict(batch) - model.predict(one)) / 16
        token = (model.predict(chunk) - model.predict(one)) / 1024
        context = model.predict(StepLoad(1, 1, 100_000)) - model.predict(one)
        return cls(base / 1e3, request / 1e3, token / 1e3, context / 1e8)


class Load:
    """What each replica has to do, from the placements made there.

    Attributes:
        running: int64[replicas] turns in flight.
        context: float64[replicas] tokens of context of those.
        live: int64[replicas] trajectories whose last turn was there, and which are not over.
        busy_until: float64[replicas] time at which the prefill placed there will be done.
    """

    def __init__(self) -> None:
        self.running = np.zeros(0, dtype=np.int64)
        self.live = np.zeros(0, dtype=np.int64)
        self.context = np.zeros(0)
        self.busy_until = np.zeros(0)
        self._home: dict[str, int] = {}

    def grow(self, replicas: int) -> None:
        """Make room for replicas numbered below this."""
        more = max(0, replicas - len(self.running))
        self.running = np.append(self.running, np.zeros(more, dtype=np.int64))
        self.live = np.append(self.live, np.zeros(more, dtype=np.int64))
        self.context = np.append(self.context, np.zeros(more))
        self.busy_until = np.append(self.busy_until, np.zeros(more))

    def add(self, replica: int, trajectory: str, context: int, prefill_s: float, now: float) -> None:
        """A turn was placed there."""
        self.end(trajectory)
        self._home[trajectory] = replica
        self.live[replica] += 1
        self.running[replica] += 1
        self.context[replica] += context
        self.busy_until[replica] = max(self.busy_until[replica], now) + prefill_s

    def remove(self, replica: int, context: int) -> None:
        """That turn is over."""
        self.running[replica] -= 1
        self.context[replica] -= context

    def end(self, trajectory: str) -> None:
        """The trajectory is over, or elsewhere."""
        home = self._home.pop(trajectory, None)
        if home is not None:
            self.live[home] -= 1

    def lost(self, replica: int) -> None:
        """What was queued there is gone."""
        self.busy_until[replica : replica + 1] = 0.0  # none where it was never heard of
        for trajectory in [name for name, home in self._home.items() if home == replica]:
            self.end(trajectory)

    @property
    def duty(self) -> float:
        """Share of live trajectories that have a turn in flight; the others' tools run."""
        return float(self.running.sum() / max(1, self.live.sum()))


@dataclass(frozen=True, slots=True)
class Demand:
    """What a turn, and its trajectory after it, will ask of a replica.

    Attributes:
        context: length of the prompt, in tokens.
        output: tokens this turn is expected to generate.
        later: tokens that later turns are.
    """

    context: int
    output: float
    later: float


def cost(
    load: Load,
    paces: np.ndarray,
    replicas: np.ndarray,
    uncached: np.ndarray,
    demand: Demand,
    now: float,
    weights: Weights,
) -> Seconds:
    """Cost of a turn on each of these replicas.

    Args:
        load: what they have to do.
        paces: float64[all replicas, 4], (base, request, token, context).
        replicas: int64[n], which ones.
        uncached: float64[n], tokens of the prompt that would have to be computed.
        demand: of the turn and its trajectory.
        now: the time.
        weights: of the terms.
    """
    base, request, token, attended = paces[replicas].T
    running, usual = load.running[replicas], load.live[replicas] * load.duty
    prefill = uncached * token
    queue = np.maximum(load.busy_until[replicas] - now, 0.0)
    slower = request + demand.context * attended
    step = base + running * request + load.context[replicas] * attended + slower
    usual_step = base + (usual + 1) * slower
    pace = demand.output * step + demand.later * usual_step
    own = weights.prefill * prefill + weights.queue * queue + weights.pace * pace
    others = running * (prefill + demand.output * slower) + usual * demand.later * slower
    return own + weights.others * others
