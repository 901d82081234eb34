"""WAR's placement: by where the KV is, by how far trajectories are, by what the caches hold.

Each turn goes where it costs least (`cost`), among the replicas whose KV cache has room
for its trajectory (`admission`); where none has, it waits. What a replica holds is known
from the placements made there (`prefix_index`), corrected by what the engines say they
found cached; how much a trajectory still needs is learned from those that ended
(`progress`). A turn that has waited for too long is placed whatever it costs, as the
sandbox behind it has a time to live.

At low load there is room everywhere and the cheapest replica is the one that holds the
trajectory: this is then sticky, least loaded at first sight, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from nemo_war.config import StepTimePrior
from nemo_war.generation.step_time import StepTimeModel
from nemo_war.routing.admission import GROWTH_SHARE, Admission, Claim
from nemo_war.routing.blocks import Chains, salt_of
from nemo_war.routing.cost import Demand, Load, Pace, Weights, cost
from nemo_war.routing.facts import Books, Outcome, ReplicaFacts, TurnFacts, Waiting
from nemo_war.routing.policy import Policy
from nemo_war.routing.prefix_index import Lease, PrefixIndex
from nemo_war.routing.progress import Progress, Remaining

_TAIL = 0.1
"""Part of a step's trajectories that are its tail: what is still live then, the step waits for."""
_TIE = 1e-3
"""Relative difference below which costs count as equal, and go at random."""
_SHORTLIST = 8
"""Cheapest replicas of which it is found out what they would evict; that takes a microsecond each."""
_NO_CHAIN = np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Options:
    """What the policy does; everything but the defaults is for ablations.

    Attributes:
        order: of waiting newcomers, by their expected remaining output. Longest first: a step lasts as long
            as its longest trajectory, which had better begin early (Graham's list scheduling). Simulated on
            tau-bench with room for one trajectory in twelve it took 0.89 of the makespan in order of arrival;
            with more room the order matters little.
        admission: whether to hold what does not fit.
        growth_share: part of the expected growth that has to fit too.
        progress: whether to predict; without, a trajectory is expected to end with this turn.
        patience_s: waiting time after which a turn is placed regardless of room.
        block_tokens: tokens per block of the index: the engine's block, or a multiple of it.
        weights: of the terms of the cost.
    """

    order: Literal["longest", "shortest", "arrival"] = "longest"
    admission: bool = True
    growth_share: float = GROWTH_SHARE
    progress: bool = True
    patience_s: float = 120.0
    block_tokens: int = 64
    weights: Weights = field(default_factory=Weights)


@dataclass(slots=True)
class _Prepared:
    """What is computed once per turn, however often it is considered."""

    chain: np.ndarray
    remaining: Remaining


class WorkloadAware(Policy):
    """The policy behind `routing.policy: war`."""

    def __init__(self, options: Options | None = None, seed: int = 0) -> None:
        super().__init__(seed)
        self._options = options or Options()
        self._chains = Chains(self._options.block_tokens)
        self._index = PrefixIndex()
        self._admission = Admission(self._options.growth_share)
        self._progress = Progress()
        self._load = Load()
        self._paces = np.zeros((0, 4))
        self._candidates: Sequence[ReplicaFacts] = ()
        self._numbers = np.zeros(0, dtype=np.int64)
        self._places: dict[int, int] = {}
        self._known: dict[int, ReplicaFacts] = {}
        self._ties = np.random.default_rng(seed)
        self._default_pace = Pace.of(StepTimeModel(StepTimePrior()))
        self._prepared: dict[int, _Prepared] = {}
        self._leases: dict[int, Lease | None] = {}
        self._left = self._tail = 0

    def begin_step(self, trajectories: int) -> None:
        """A new step; its size tells where its tail begins."""
        self._left, self._tail = trajectories, round(_TAIL * trajectories)

    def advance_epoch(self, epoch: int) -> None:
        """No KV is of use any more, so that nothing ties a trajectory to its replica."""
        self._index.clear()
        self._load.busy_until[:] = 0.0
        self._prepared.clear()

    def order(self, waiting: Sequence[Waiting], now: float) -> Sequence[Waiting]:
        """Overdue turns first, then trajectories whose KV is held, then newcomers."""
        sign = {"shortest": 1.0, "longest": -1.0, "arrival": 0.0}[self._options.order]

        def key(each: Waiting) -> tuple[bool, bool, float, int]:
            overdue = now - each.since > self._options.patience_s
            holds = self._admission.home(each.turn.metadata.trajectory) is not None
            length = sign * self._prepare(each).remaining.output_tokens if sign else 0.0
            return not overdue, not holds, length, each.ticket

        return sorted(waiting, key=key) if len(waiting) > 1 else waiting

    def choose(
        self, turn: Waiting, candidates: Sequence[ReplicaFacts], books: Books, now: float
    ) -> int | None:
        """The cheapest replica with room; any replica has room for a turn that is overdue."""
        if candidates != self._candidates:  # by identity, so that the usual case costs next to nothing
            self._know(candidates)
        prepared = self._prepare(turn)
        cached = self._cached(prepared, turn.turn)
        regardless = not self._options.admission or now - turn.since > self._options.patience_s
        for place in self._by_cost(prepared, turn.turn, cached, now):
            facts = candidates[place]
            wanted = self._claim(prepared, turn.turn, int(cached[place]))
            if regardless or self._admission.admits(facts.replica, facts.kv_tokens, wanted, now):
                return facts.replica
        return None

    def describe(self, turn: Waiting) -> tuple[bool, int]:
        """Critical is what is left in the tail of a step; of a step nobody announced nothing is."""
        return 0 < self._left <= self._tail, round(self._prepare(turn).remaining.output_tokens)

    def placed(self, turn: Waiting, replica: int, now: float) -> None:
        """Book what the turn does to its replica."""
        prepared = self._prepared.pop(turn.ticket)
        name = turn.turn.metadata.trajectory
        lease = self._index.place(replica, name, prepared.chain) if turn.turn.prompt is not None else None
        cached = lease.believed * self._options.block_tokens if lease else 0
        prefill_s = (turn.turn.prompt_tokens - cached) * self._paces[replica, 2]
        self._load.add(replica, name, turn.turn.prompt_tokens, prefill_s, now)
        self._admission.claim(replica, self._claim(prepared, turn.turn, cached), now)
        self._leases[turn.ticket] = lease

    def finished(self, placed: Waiting, replica: int, outcome: Outcome | None, now: float) -> None:
        """Release what the turn held, and learn from its answer."""
        turn, block = placed.turn, self._options.block_tokens
        name, lease = turn.metadata.trajectory, self._leases.pop(placed.ticket)
        output = outcome.output_tokens if outcome else 0
        self._load.remove(replica, turn.prompt_tokens)
        if outcome is not None:
            self._progress.answered(name, output)
        if lease is not None:
            if outcome is not None and outcome.cached_tokens is not None and not turn.estimated:
                self._index.correct(lease, outcome.cached_tokens // block)
            self._index.release(lease, (turn.prompt_tokens % block + output) // block)
        self._admission.idle(name, turn.prompt_tokens + output, self._remaining(turn).growth, now)

    def ended(self, trajectory: str) -> None:
        """Release what was held; its course is an example from now on."""
        self._left -= 1
        self._progress.end(trajectory)
        self._load.end(trajectory)
        self._admission.release(trajectory)
        self._index.end(trajectory)
        self._chains.drop(trajectory)

    def lost(self, replica: int) -> None:
        """What it held is gone."""
        self._index.clear(replica)
        self._admission.lost(replica)
        self._load.lost(replica)

    def withdrawn(self, ticket: int) -> None:
        """The turn was taken out of the queue."""
        self._prepared.pop(ticket, None)

    def _prepare(self, waiting: Waiting) -> _Prepared:
        prepared = self._prepared.get(waiting.ticket)
        if prepared is None:
            prepared = self._prepared[waiting.ticket] = self._describe(waiting.turn)
        return prepared

    def _describe(self, turn: TurnFacts) -> _Prepared:
        metadata = turn.metadata
        self._progress.turn(metadata.trajectory, metadata.group, turn.prompt_tokens)
        salt = salt_of(metadata.epoch, turn.variant)
        chain = _NO_CHAIN
        if turn.prompt is not None:
            chain = self._chains.extend(metadata.trajectory, turn.prompt, salt)
        return _Prepared(chain, self._remaining(turn))

    def _claim(self, prepared: _Prepared, turn: TurnFacts, cached: int) -> Claim:
        return Claim(turn.metadata.trajectory, turn.prompt_tokens, prepared.remaining.growth, cached)

    def _remaining(self, turn: TurnFacts) -> Remaining:
        if not self._options.progress:
            return Remaining(1.0, turn.max_new_tokens, turn.max_new_tokens, turn.max_new_tokens)
        return self._progress.remaining(turn.metadata.trajectory, turn.metadata.group)

    def _cached(self, prepared: _Prepared, turn: TurnFacts) -> np.ndarray:
        """int64[candidates], tokens of the prompt that each is believed to hold."""
        name, block = turn.metadata.trajectory, self._options.block_tokens
        at_home = self._numbers == self._admission.home(name)
        context = min(self._admission.context(name), turn.prompt_tokens)
        if turn.prompt is None:  # only where its last turn was can be known
            return context * at_home
        cached = np.zeros(len(self._numbers), dtype=np.int64)
        for replica, blocks in self._index.match(prepared.chain, name).items():
            place = self._places.get(replica)
            if place is not None:
                cached[place] = block * blocks
        # The index knows full blocks only; without the rest, short conversations would go anywhere.
        rest = context - cached
        return cached + rest * (at_home & (rest > 0) & (rest < block))

    def _by_cost(self, prepared: _Prepared, turn: TurnFacts, cached: np.ndarray, now: float) -> list[int]:
        """Places of the candidates, the cheapest first."""
        replicas = self._numbers
        uncached, weights = turn.prompt_tokens - cached, self._options.weights
        seconds = cost(
            self._load, self._paces, replicas, uncached, _demand(turn, prepared.remaining), now, weights
        )
        seconds *= 1 + _TIE * self._ties.random(len(seconds))
        cheapest = np.argsort(seconds).tolist()
        shortlist, rest = cheapest[:_SHORTLIST], cheapest[_SHORTLIST:]
        for place in shortlist if weights.evicted else ():
            replica, block = int(replicas[place]), self._options.block_tokens
            evicted = self._index.evicted_by(replica, int(uncached[place]) // block, turn.metadata.trajectory)
            seconds[place] += weights.evicted * evicted * block * self._paces[replica, 2]
        return sorted(shortlist, key=seconds.__getitem__) + rest

    def _know(self, candidates: Sequence[ReplicaFacts]) -> None:
        """Take over what is new about the replicas."""
        self._candidates = list(candidates)
        self._numbers = np.array([facts.replica for facts in candidates], dtype=np.int64)
        self._places = {facts.replica: place for place, facts in enumerate(candidates)}
        for facts in candidates:
            if self._known.get(facts.replica) is not facts:
                self._known[facts.replica] = facts
                self._learn(facts)

    def _learn(self, facts: ReplicaFacts) -> None:
        replicas = facts.replica + 1
        if replicas > len(self._paces):
            missing = np.tile(np.array(self._default_pace), (replicas - len(self._paces), 1))
            self._paces = np.concatenate([self._paces, missing])
            self._load.grow(replicas)
        self._paces[facts.replica] = (
            self._default_pace if facts.step_time is None else Pace.of(facts.step_time)
        )
        self._index.set_capacity(facts.replica, facts.kv_tokens // self._options.block_tokens)


def _demand(turn: TurnFacts, remaining: Remaining) -> Demand:
    output = max(1.0, remaining.output_tokens / max(1.0, remaining.turns))
    return Demand(turn.prompt_tokens, output, max(0.0, remaining.output_tokens - output))
