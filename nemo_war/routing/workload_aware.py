"""WAR's placement: by where the KV is, by how far trajectories are, by what the caches hold.

Each turn goes where it costs least (`cost`), among the replicas whose KV cache has room
for its trajectory (`admission`); where none has, it waits. What a replica holds is known
from the placements made there (`prefix_index`), corrected by what the engines say they
found cached; how much a trajectory still needs is learned from how long others live
(`progress`), and how much room they need to grow from what they had to compute again
(`headroom`). A turn that has waited for too long is placed whatever it costs, as the
sandbox behind it has a time to live.

At low load there is room everywhere and the cheapest replica is the one that holds the
trajectory: this is then sticky, least loaded at first sight, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_war.config import StepTimePrior
from nemo_war.generation.step_time import StepTimeModel
from nemo_war.metadata import TurnMetadata
from nemo_war.routing.admission import Admission, Claim
from nemo_war.routing.blocks import Chains, salt_of
from nemo_war.routing.cost import Costs, Demand, Load, Pace, cost
from nemo_war.routing.facts import Books, Outcome, ReplicaFacts, TurnFacts, Waiting
from nemo_war.routing.options import Options
from nemo_war.routing.policy import Policy
from nemo_war.routing.prefix_index import Lease, PrefixIndex
from nemo_war.routing.progress import Progress, Remaining
from nemo_war.routing.siblings import Siblings
from nemo_war.snapshot import State

_TAIL = 0.1
"""Part of a step's trajectories that are its tail: what is still live then, the step waits for."""
_ESTIMATE = 8
"""Part of a prompt, one in so many tokens, by which an estimate of its length may be off."""
_LATER = 0.25
"""Part of what a placement means for a trajectory's later turns that counts, as these can go elsewhere.
Simulated makespans at 0, 0.25 and 1: 217, 219, 224 s for tau-bench with room for a third; for coding sessions
with ample room 837, 833, 846 s, with room for six on a replica 955, 961, 978 s."""
_SPARED = 0.2
"""Share of its engine steps that drafts from siblings spare a trajectory, where draft tokens cost nothing.
In tau-bench rollouts 13 % with one that is over, 27 % with two or three, beside other tasks' history."""
_NO_CHAIN = np.zeros(0, dtype=np.uint64)


@dataclass(slots=True)
class _Course:
    """What is known of one turn, from when it is first considered to its end.

    Attributes:
        chain: block hashes of its prompt; empty where that is not known.
        computed: tokens of its prompt that its trajectory's last answer had computed, on whatever replica.
        remaining: what its trajectory is expected to need.
        lease: its blocks on the replica where it was placed.
    """

    chain: np.ndarray
    computed: int
    remaining: Remaining
    lease: Lease | None = None


class WorkloadAware(Policy):
    """The policy behind `routing.policy: war`."""

    def __init__(self, options: Options | None = None, seed: int = 0) -> None:
        super().__init__(seed)
        self._options = options or Options()
        self._chains = Chains(self._options.block_tokens)
        self._index = PrefixIndex()
        self._admission = Admission()
        self._progress = Progress()
        self._load = Load()
        self._siblings = Siblings()
        self._candidates: Sequence[ReplicaFacts] = ()
        self._numbers = np.zeros(0, dtype=np.int64)
        self._places: dict[int, int] = {}
        self._known: dict[int, ReplicaFacts] = {}
        self._default_pace = Pace.of(StepTimeModel(StepTimePrior()))
        self._waiting: dict[int, _Course] = {}
        self._placed: dict[int, _Course] = {}
        self._computed: dict[str, int] = {}  # tokens of context for the last answer, if nothing voided them
        self._left = self._tail = 0

    def begin_step(self, trajectories: int) -> None:
        """A new step; its size tells where its tail begins."""
        self._left, self._tail = trajectories, round(_TAIL * trajectories)
        self._siblings.clear()

    def advance_epoch(self, epoch: int) -> None:
        """No KV is of use any more, so that nothing ties a trajectory to its replica."""
        self._index.clear()
        self._load.busy_until[:] = 0.0
        self._computed.clear()
        self._waiting.clear()

    def order(self, waiting: Sequence[Waiting], now: float) -> Sequence[Waiting]:
        """Overdue turns first, then trajectories whose KV is held, then newcomers."""
        sign = {"shortest": 1.0, "longest": -1.0, "arrival": 0.0}[self._options.order]

        def key(each: Waiting) -> tuple[bool, bool, float, int]:
            overdue = now - each.since > self._options.patience_s
            holds = self._admission.home(each.turn.metadata.trajectory) is not None
            length = sign * self._course(each).remaining.output_tokens if sign else 0.0
            return not overdue, not holds, length, each.ticket

        return sorted(waiting, key=key) if len(waiting) > 1 else waiting

    def choose(
        self, turn: Waiting, candidates: Sequence[ReplicaFacts], books: Books, now: float
    ) -> int | None:
        """The cheapest replica with room; any replica has room for a turn that is overdue."""
        if candidates != self._candidates:  # by identity, so that the usual case costs next to nothing
            self._know(candidates)
        course = self._course(turn)
        cached = self._cached(course, turn.turn)
        costs = self._costs(course, turn, cached, now)
        regardless = not self._options.admission or now - turn.since > self._options.patience_s
        for _ in candidates:
            place = int(costs.seconds.argmin())
            facts, wanted = candidates[place], _claim(turn.turn, cached.item(place))
            keeping_s = costs.keeping_s.item(place)
            if regardless or self._admission.admits(facts.replica, facts.kv_tokens, wanted, now, keeping_s):
                return facts.replica
            costs.seconds[place] = np.inf
        return None

    def describe(self, turn: Waiting) -> tuple[bool, int]:
        """Critical is what is left in the tail of a step; of a step nobody announced nothing is."""
        return 0 < self._left <= self._tail, round(self._course(turn).remaining.output_tokens)

    def placed(self, turn: Waiting, replica: int, now: float) -> None:
        """Book what the turn does to its replica."""
        course = self._placed[turn.ticket] = self._waiting.pop(turn.ticket)
        name, prompt_tokens = turn.turn.metadata.trajectory, turn.turn.prompt_tokens
        cached = 0
        if turn.turn.prompt is not None:
            course.lease = self._index.place(replica, name, course.chain)
            cached = course.lease.believed * self._options.block_tokens
        prefill_s = (prompt_tokens - cached) * self._load.paces[replica, 2]
        self._load.add(replica, name, prompt_tokens, prefill_s, now)
        self._siblings.placed(turn.turn.metadata.group, name, replica)
        self._admission.claim(replica, _claim(turn.turn, cached))

    def finished(self, placed: Waiting, replica: int, outcome: Outcome | None, now: float) -> None:
        """Release what the turn held, and learn from its answer."""
        turn, course = placed.turn, self._placed.pop(placed.ticket)
        name, block = turn.metadata.trajectory, self._options.block_tokens
        output = outcome.output_tokens if outcome else 0
        self._load.remove(replica, turn.prompt_tokens)
        if outcome is not None:
            self._progress.answered(name, output)
            self._learn_room(course, replica, outcome, now, estimated=turn.estimated)
            if self._admission.home(name) is not None:  # else it is over
                self._computed[name] = turn.prompt_tokens + output
        lease = course.lease
        if lease is not None:
            if outcome is not None and outcome.cached_tokens is not None and not turn.estimated:
                self._index.correct(lease, outcome.cached_tokens // block)
            self._index.release(lease, (turn.prompt_tokens % block + output) // block)
        self._admission.idle(name, turn.prompt_tokens + output, now)

    def ended(self, trajectory: str) -> None:
        """Release what was held; how long it lived is known now."""
        self._left -= 1
        self._computed.pop(trajectory, None)
        self._progress.end(trajectory)
        self._load.end(trajectory)
        self._admission.release(trajectory)
        self._index.end(trajectory)
        self._chains.drop(trajectory)

    def lost(self, replica: int) -> None:
        """What it held is gone."""
        self._computed.clear()  # of some it will be computed again, and not for want of room
        self._index.clear(replica)
        self._admission.lost(replica)
        self._load.lost(replica)
        self._siblings.lost(replica)

    def withdrawn(self, ticket: int) -> None:
        """The turn was taken out of the queue."""
        self._waiting.pop(ticket, None)

    def state(self) -> State:
        """How long trajectories live, and how much room they need to grow."""
        parts = {"progress": self._progress.state(), "headroom": self._admission.headroom.state()}
        return State.join(parts)

    def restore(self, state: State) -> None:
        """Go on with what a state learned.

        Raises:
            ValueError: it is no state of this policy.
        """
        self._progress.restore(state.part("progress"))
        self._admission.headroom.restore(state.part("headroom"))

    def _course(self, waiting: Waiting) -> _Course:
        course = self._waiting.get(waiting.ticket)
        if course is None:
            course = self._waiting[waiting.ticket] = self._begin(waiting.turn)
        return course

    def _begin(self, turn: TurnFacts) -> _Course:
        metadata = turn.metadata
        self._progress.turn(metadata.trajectory, metadata.group)
        remaining = Remaining(1.0, turn.max_new_tokens)
        if self._options.progress:
            remaining = self._progress.remaining(metadata.trajectory, metadata.group)
        computed = self._computed.get(metadata.trajectory, 0)
        if turn.prompt is None:
            return _Course(_NO_CHAIN, min(computed, turn.prompt_tokens), remaining)
        salt = salt_of(metadata.epoch, turn.variant)
        chain, known = self._chains.extend(metadata.trajectory, turn.prompt, salt)
        return _Course(chain, min(computed, known * self._options.block_tokens), remaining)

    def _learn_room(
        self, course: _Course, replica: int, outcome: Outcome, now: float, *, estimated: bool
    ) -> None:
        """Count what the replica had to compute again, within the precision to which that is known."""
        if outcome.cached_tokens is None:
            return
        precision = self._options.block_tokens + (course.computed // _ESTIMATE if estimated else 0)
        again = max(0, course.computed - outcome.cached_tokens - precision)
        step_s, _, token_s, _ = self._load.paces[replica].tolist()
        self._admission.headroom.recomputed(again * token_s, len(self._known), step_s, now)

    def _cached(self, course: _Course, turn: TurnFacts) -> np.ndarray:
        """int64[candidates], tokens of the prompt that each is believed to hold."""
        name, block = turn.metadata.trajectory, self._options.block_tokens
        cached = np.zeros(len(self._numbers), dtype=np.int64)
        if turn.prompt is not None:
            for replica, blocks in self._index.match(course.chain, name).items():
                place = self._places.get(replica)
                if place is not None:
                    cached[place] = block * blocks
        home = self._admission.home(name)
        place = None if home is None else self._places.get(home)
        if place is not None:
            # The index knows full blocks only; without the rest, short conversations would go anywhere.
            rest = min(self._admission.context(name), turn.prompt_tokens) - cached.item(place)
            if turn.prompt is None or 0 < rest < block:
                cached[place] += rest
        return cached

    def _costs(self, course: _Course, turn: Waiting, cached: np.ndarray, now: float) -> Costs:
        remaining = course.remaining
        output = max(1.0, remaining.output_tokens / max(1.0, remaining.turns))
        later = _LATER * max(0.0, remaining.output_tokens - output)
        demand = Demand(turn.turn.prompt_tokens, output, later)
        seed = self._random.getrandbits(63)
        spared = self._spared(turn.turn.metadata)
        return cost(self._load, self._numbers, cached, spared, demand, now, self._options.weights, seed)

    def _spared(self, metadata: TurnMetadata) -> np.ndarray:
        """float64[candidates], share of its engine steps that drafts from siblings spare a trajectory."""
        spared = np.zeros(len(self._numbers))
        for replica in self._siblings.where(metadata.group, metadata.trajectory):
            place = self._places.get(replica)
            if place is not None and self._candidates[place].speculates:
                spared[place] = _SPARED
        return spared

    def _know(self, candidates: Sequence[ReplicaFacts]) -> None:
        """Take over what is new about the replicas."""
        self._candidates = list(candidates)
        self._numbers = np.array([facts.replica for facts in candidates], dtype=np.int64)
        self._places = {facts.replica: place for place, facts in enumerate(candidates)}
        for facts in candidates:
            if self._known.get(facts.replica) is not facts:
                self._known[facts.replica] = facts
                pace = self._default_pace if facts.step_time is None else Pace.of(facts.step_time)
                self._load.learn(facts.replica, pace)
                self._index.set_capacity(facts.replica, facts.kv_tokens // self._options.block_tokens)


def _claim(turn: TurnFacts, cached: int) -> Claim:
    return Claim(turn.metadata.trajectory, turn.prompt_tokens, cached)
