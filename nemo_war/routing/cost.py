"""What a placement costs, in seconds, on every replica at once.

    own      prefill of what is not cached + the prefill queued before it
             + the trajectory's remaining output at the pace of the batch it joins
             - the engine steps that drafts from its siblings there spare it
    others   that prefill, and the slower pace, for all who run there

This turn meets what runs now; the trajectory's later turns, which follow it, meet what
usually runs where so many trajectories live. That is what makes a move to an idle replica
worth its prefill, or not. A draft token is worth a share of a step's fixed time, one in so
many as run there, less its own: the fuller the batch, the less siblings mean. All times come
from the replicas' own step-time models.
The KV that a placement evicts is not priced here: who is admitted decides about that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_war.generation.step_time import StepLoad, StepTimeModel
from nemo_war.kernel import kernel
from nemo_war.routing.options import Weights

_TIE = 1e-3
"""Relative difference below which costs count as equal, and go at random."""


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
        paces: float64[replicas, 4], as in `Pace`.
        running: int64[replicas] turns in flight.
        context: float64[replicas] tokens of context of those.
        live: int64[replicas] trajectories whose last turn was there, and which are not over.
        busy_until: float64[replicas] time at which the prefill placed there will be done.
    """

    def __init__(self) -> None:
        self.paces = np.zeros((0, 4))
        self.running = np.zeros(0, dtype=np.int64)
        self.live = np.zeros(0, dtype=np.int64)
        self.context = np.zeros(0)
        self.busy_until = np.zeros(0)
        self._home: dict[str, int] = {}
        self._in_flight = 0

    def learn(self, replica: int, pace: Pace) -> None:
        """A replica is this fast."""
        self._grow(replica + 1, pace)
        self.paces[replica] = pace

    def add(self, replica: int, trajectory: str, context: int, prefill_s: float, now: float) -> None:
        """A turn was placed there."""
        self.end(trajectory)
        self._home[trajectory] = replica
        self.live[replica] += 1
        self.running[replica] += 1
        self._in_flight += 1
        self.context[replica] += context
        self.busy_until[replica] = max(self.busy_until[replica], now) + prefill_s

    def remove(self, replica: int, context: int) -> None:
        """That turn is over."""
        self.running[replica] -= 1
        self._in_flight -= 1
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
        return self._in_flight / max(1, len(self._home))

    def _grow(self, replicas: int, pace: Pace) -> None:
        more = replicas - len(self.running)
        if more <= 0:
            return
        self.paces = np.concatenate([self.paces, np.tile(np.array(pace), (more, 1))])
        self.running = np.append(self.running, np.zeros(more, dtype=np.int64))
        self.live = np.append(self.live, np.zeros(more, dtype=np.int64))
        self.context = np.append(self.context, np.zeros(more))
        self.busy_until = np.append(self.busy_until, np.zeros(more))


class Demand(NamedTuple):
    """What a turn, and its trajectory after it, will ask of a replica.

    Attributes:
        context: length of the prompt, in tokens.
        output: tokens this turn is expected to generate.
        later: tokens that later turns are.
    """

    context: int
    output: float
    later: float


class Costs(NamedTuple):
    """Of a turn on each of some replicas.

    Attributes:
        seconds: float64[n], what the placement costs.
        keeping_s: float64[n], seconds for which a token of idle KV may keep its room, before that would have
            served others better: what computing it again takes, by what one more request in the batch brings.
    """

    seconds: np.ndarray
    keeping_s: np.ndarray


def cost(
    load: Load,
    replicas: np.ndarray,
    cached: np.ndarray,
    spared: np.ndarray,
    demand: Demand,
    now: float,
    weights: Weights,
    seed: int,
) -> Costs:
    """Costs of a turn on each of these replicas.

    Args:
        load: what they have to do, and how fast they are.
        replicas: int64[n], which ones.
        cached: int64[n], tokens of the prompt that would not have to be computed.
        spared: float64[n], share of its engine steps that drafts from siblings spare it, where they are free.
        demand: of the turn and its trajectory.
        now: the time.
        weights: of the terms.
        seed: of this turn's ties.
    """
    costs = Costs(np.empty(len(replicas)), np.empty(len(replicas)))
    _cost(
        load.paces, load.running, load.live, load.context, load.busy_until, load.duty, replicas, cached,
        spared, demand, now, weights, np.uint64(seed), costs.seconds, costs.keeping_s,
    )  # fmt: skip
    return costs


@kernel
def _cost(
    paces: np.ndarray,
    running: np.ndarray,
    live: np.ndarray,
    context: np.ndarray,
    busy_until: np.ndarray,
    duty: float,
    replicas: np.ndarray,
    cached: np.ndarray,
    spared: np.ndarray,
    demand: Demand,
    now: float,
    weights: Weights,
    seed: np.uint64,
    seconds: np.ndarray,
    keeping_s: np.ndarray,
) -> None:
    """Fill `Costs`."""
    prompt, output, later = demand
    of_prefill, of_queue, of_pace, of_others, of_siblings = weights
    for place in range(len(replicas)):
        replica = replicas[place]
        base, request = paces[replica, 0], paces[replica, 1]
        token, attended = paces[replica, 2], paces[replica, 3]
        batch, usual = running[replica], live[replica] * duty
        prefill = (prompt - cached[place]) * token
        queue = max(busy_until[replica] - now, 0.0)
        slower = request + prompt * attended
        filled = base + batch * request + context[replica] * attended
        pace = output * (filled + slower) + later * (base + (usual + 1) * slower)
        drafts = output * max(base - batch * token, 0.0) + later * max(base - usual * token, 0.0)
        own = of_prefill * prefill + of_queue * queue + of_pace * pace
        own -= of_siblings * spared[place] * drafts
        others = batch * (prefill + output * slower) + usual * later * slower
        seed = (seed ^ (seed >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(place + 1)
        tie = float(seed >> np.uint64(40)) / (1 << 24)
        seconds[place] = (own + of_others * others) * (1 + _TIE * tie)
        keeping_s[place] = token * max(batch, 1) * filled / base if base > 0 else np.inf
