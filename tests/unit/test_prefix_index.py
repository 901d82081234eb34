"""The prefix index against a block-by-block model of replicas that evict as vLLM does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from xxhash import xxh3_64_intdigest

from nemo_war.routing.blocks import Chains, salt_of
from nemo_war.routing.prefix_index import Lease, PrefixIndex

REPLICAS = range(3)
MAX_BLOCKS = 32
NAMES = "abcd"


def chain_of(text: str) -> np.ndarray:
    """A chain of one block a letter; equal beginnings have equal names."""
    return np.array([xxh3_64_intdigest(text[: end + 1].encode()) for end in range(len(text))], np.uint64)


@dataclass
class Request:
    """One request of the model, and the index's lease for it."""

    replica: int
    text: str
    known: int
    believed: int
    stamp: int
    lease: Lease
    outputs: list[str] = field(default_factory=list)
    void: bool = False


@dataclass
class ModelReplica:
    """Blocks one by one: `idle` oldest first, `pins` of those in use."""

    capacity: int
    learned: int = 0
    idle: list[str] = field(default_factory=list)
    pins: Counter[str] = field(default_factory=Counter)
    stamp: dict[str, int] = field(default_factory=dict)

    @property
    def used(self) -> int:
        return len(self.idle) + len(+self.pins)

    @property
    def bound(self) -> int:
        return self.capacity or self.learned

    def holds(self, text: str) -> int:
        """Leading blocks of a text; a block is the text up to its end."""
        held = {*self.idle, *+self.pins}
        return next((end for end in range(len(text)) if text[: end + 1] not in held), len(text))

    def pin(self, block: str) -> None:
        if block in self.idle:
            self.idle.remove(block)
        self.pins[block] += 1

    def unpin(self, block: str, stamp: int) -> None:
        self.pins[block] -= 1
        if not self.pins[block]:
            self.idle.append(block)
            self.stamp[block] = stamp

    def evict(self, count: int) -> None:
        del self.idle[: max(0, count)]


class Traffic(RuleBasedStateMachine):
    """Turns are placed, end, are corrected and forgotten in any order."""

    @initialize(capacities=st.tuples(*[st.sampled_from([0, 5, 12, 20])] * len(REPLICAS)))
    def start(self, capacities):
        self.index = PrefixIndex(max_blocks=MAX_BLOCKS)
        self.model = {replica: ModelReplica(capacities[replica]) for replica in REPLICAS}
        for replica in REPLICAS:
            self.index.set_capacity(replica, capacities[replica])
        self.turns: dict[str, Request] = {}
        self.running: list[Request] = []
        self.over: list[Request] = []
        self.texts = [""]
        self.clock = 0

    def returned(self, name: str, text: str) -> int:
        """Blocks of the last turn's output that the text is taken to go on with."""
        turn = self.turns.get(name)
        if turn is None or not text.startswith(turn.text):
            return 0
        replica = self.model[turn.replica]
        left = sum(block in replica.idle for block in turn.outputs)
        return min(left, len(text) - len(turn.text)) if replica.holds(text) == len(turn.text) else 0

    def matches(self, name: str, text: str) -> dict[int, int]:
        depths = {number: replica.holds(text) for number, replica in self.model.items()}
        if returned := self.returned(name, text):
            depths[self.turns[name].replica] += returned
        return {number: depth for number, depth in depths.items() if depth}

    def make_room(self, replica: ModelReplica) -> None:
        if replica.bound:
            replica.evict(replica.used - replica.bound)
        while (excess := sum(each.used for each in self.model.values()) - MAX_BLOCKS) > 0:
            yielding = [each for each in self.model.values() if each.idle]
            if not yielding:
                break
            max(yielding, key=lambda each: each.used).evict(excess)

    @rule(
        name=st.sampled_from(NAMES),
        number=st.sampled_from(REPLICAS),
        base=st.integers(0, 5),
        kept=st.integers(0, 12),
        more=st.text("xy", max_size=6),
    )
    def place(self, name, number, base, kept, more):
        text = self.texts[-1 - base % len(self.texts)][:kept] + more
        self.texts.append(text)
        replica = self.model[number]
        known, believed = replica.holds(text), self.matches(name, text).get(number, 0)
        deepest = text[:known]
        stamp = replica.stamp[deepest] if deepest in replica.idle else 0
        turn = self.turns.get(name)
        if believed > known:
            for block in [block for block in turn.outputs if block in replica.idle][known - believed :]:
                replica.idle.remove(block)
        for end in range(len(text), 0, -1):
            replica.pin(text[:end])
        lease = self.index.place(number, name, chain_of(text))
        assert lease.believed == believed
        self.turns[name] = Request(number, text, known, believed, stamp, lease)
        self.running.append(self.turns[name])
        self.make_room(replica)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9), outputs=st.integers(0, 4))
    def release(self, which, outputs):
        request = self.running.pop(which % len(self.running))
        self.over.append(request)
        self.index.release(request.lease, outputs)
        if request.void:
            return
        replica = self.model[request.replica]
        self.clock += 1
        request.outputs = [f"output {self.clock} {number}" for number in range(outputs)]
        for block in reversed(request.outputs):
            replica.pin(block)
            replica.unpin(block, self.clock)
        for end in range(len(request.text), 0, -1):
            replica.unpin(request.text[:end], self.clock)
        self.make_room(replica)

    @precondition(lambda self: self.running or self.over)
    @rule(which=st.integers(0, 9), more=st.integers(-4, 4))
    def correct(self, which, more):
        requests = [*self.over[-3:], *self.running]
        request = requests[which % len(requests)]
        cached = max(0, request.known + more)
        self.index.correct(request.lease, cached)
        replica = self.model[request.replica]
        if request.void:
            return
        if cached > request.believed:
            replica.learned = 0
        elif request.stamp and cached < min(request.known, len(request.text) - 1):
            replica.idle = [block for block in replica.idle if replica.stamp[block] > request.stamp]
            replica.learned = replica.used

    @rule(name=st.sampled_from(NAMES))
    def end(self, name):
        self.index.end(name)
        self.turns.pop(name, None)

    @rule(number=st.sampled_from(REPLICAS), capacity=st.sampled_from([0, 4, 9, 20]))
    def resize(self, number, capacity):
        self.index.set_capacity(number, capacity)
        if self.model[number].capacity != capacity:
            self.model[number].capacity = capacity
            self.make_room(self.model[number])

    @rule(number=st.sampled_from([*REPLICAS, None]), really=st.integers(0, 3))
    def clear(self, number, really):
        if really:
            return
        self.index.clear(number)
        for each in REPLICAS if number is None else [number]:
            self.model[each] = ModelReplica(self.model[each].capacity)
            for request in [*self.running, *self.over, *self.turns.values()]:
                request.void |= request.replica == each
        if number is None:
            self.turns.clear()

    @invariant()
    def both_agree(self):
        if not hasattr(self, "index"):
            return
        self.index.check_integrity()
        assert self.index.held == sum(replica.used for replica in self.model.values())
        for number, replica in self.model.items():
            assert self.index.used(number) == replica.used
        for text in self.texts[-4:]:
            for name in NAMES[:2]:
                longer = text + "xyx"
                assert self.index.match(chain_of(text), name) == self.matches(name, text)
                assert self.index.match(chain_of(longer), name) == self.matches(name, longer)


Traffic.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestAnyTrafficLeavesWhatABlockByBlockModelHolds = Traffic.TestCase


def turn(index: PrefixIndex, replica: int, name: str, text: str, output: int = 0) -> Lease:
    lease = index.place(replica, name, chain_of(text))
    index.release(lease, output)
    return lease


def test_siblings_share_their_prompt_on_a_replica():
    index = PrefixIndex()
    for number in range(16):
        turn(index, 0, f"t{number}", "system task" + chr(ord("a") + number))
    assert index.used(0) == len("system task") + 16
    assert index.match(chain_of("system task?"), "new") == {0: len("system task")}


def test_replicas_that_hold_nothing_of_a_chain_are_not_listed():
    index = PrefixIndex()
    for replica in range(1000):
        turn(index, replica, f"t{replica}", chr(replica) + "rest")
    turn(index, 3, "t", chr(7) + "r")
    assert index.match(chain_of(chr(7) + "rest and more"), "t") == {7: 5, 3: 2}


def test_the_tail_goes_before_the_head_and_the_longest_unused_first():
    index = PrefixIndex()
    index.set_capacity(0, 10)
    turn(index, 0, "a", "aaaaa")
    turn(index, 0, "b", "bbbbb")
    turn(index, 0, "c", "ccc")
    assert [index.match(chain_of(text), "?") for text in ("aaaaa", "bbbbb", "ccc")] == [
        {0: 2},
        {0: 5},
        {0: 3},
    ]


def test_a_replica_with_part_of_a_run_keeps_it_when_others_part_behind_that():
    index = PrefixIndex()
    index.set_capacity(0, 3)
    turn(index, 0, "a", "abcdef")
    turn(index, 1, "a", "abcdef")
    turn(index, 1, "b", "abcdxy")
    index.check_integrity()
    assert index.match(chain_of("abcdef"), "a") == {0: 3, 1: 6}


def test_a_running_request_keeps_its_blocks_even_beyond_capacity():
    index = PrefixIndex()
    index.set_capacity(0, 6)
    first, second = index.place(0, "a", chain_of("aaaa")), index.place(0, "b", chain_of("bbbb"))
    assert index.used(0) == 8
    index.release(first)
    assert index.match(chain_of("aaaa"), "a") == {0: 2}
    index.release(second)
    assert index.used(0) == 6


def test_an_output_takes_up_room_and_is_there_when_its_trajectory_goes_on():
    index = PrefixIndex()
    turn(index, 0, "t", "prompt", output=3)
    assert index.used(0) == 9
    assert index.match(chain_of("prompt and tool"), "t") == {0: 9}
    assert index.match(chain_of("prompt and tool"), "another") == {0: 6}
    assert index.match(chain_of("prompt a"), "t") == {0: 8}
    assert index.match(chain_of("edited prompt"), "t") == {}
    assert turn(index, 0, "t", "prompt and tool").believed == 9
    assert index.used(0) == 15


def test_an_output_stays_where_it_was_made():
    index = PrefixIndex()
    turn(index, 0, "t", "prompt", output=3)
    lease = turn(index, 1, "t", "prompt and tool")
    assert lease.believed == 0
    assert (index.used(0), index.used(1)) == (9, 15)


def test_a_branch_of_a_chain_that_is_in_use_is_kept_no_longer_than_its_own_request():
    index = PrefixIndex()
    index.set_capacity(0, 12)
    running = index.place(0, "a", chain_of("shared"))
    turn(index, 0, "b", "shared tail")
    turn(index, 0, "c", "cccc")
    assert index.match(chain_of("shared tail"), "b") == {0: 8}
    index.release(running)


def test_less_cached_than_believed_means_that_older_blocks_are_gone_too():
    index = PrefixIndex()
    for name in "abc":
        turn(index, 0, name, name * 4)
    index.correct(turn(index, 0, "b", "bbbbb"), 2)
    index.check_integrity()
    assert index.match(chain_of("aaaa"), "a") == {}
    assert index.match(chain_of("bbbbb"), "b") == {0: 5}
    assert index.match(chain_of("cccc"), "c") == {0: 4}


def test_what_was_evicted_bounds_a_replica_of_unknown_capacity_until_it_has_more():
    index = PrefixIndex()
    for name in "abc":
        turn(index, 0, name, name * 4)
    index.correct(turn(index, 0, "b", "bbbbb"), 2)
    turn(index, 0, "d", "dddd")
    assert index.used(0) == 9
    index.correct(turn(index, 0, "c", "cccccc"), 4)
    assert index.used(0) == 9
    turn(index, 0, "e", "eeee")
    assert index.used(0) == 13


def test_what_was_cut_from_a_history_is_gone_with_the_block_before_it():
    index = PrefixIndex()
    turn(index, 0, "t", "prompt and more")
    index.correct(turn(index, 0, "t", "prompt edited"), 4)
    assert index.match(chain_of("prompt and more"), "t") == {0: len("prompt ")}


def test_nothing_is_learned_from_blocks_that_may_not_have_been_computed_yet():
    index = PrefixIndex()
    for name, text in (("old", "oooo"), ("a", "prompt"), ("new", "nnnn")):
        turn(index, 0, name, text)
    index.place(0, "a", chain_of("prompt"))
    index.correct(index.place(0, "b", chain_of("prompt and more")), 0)
    assert index.match(chain_of("oooo"), "old") == {0: 4}


def test_a_last_block_that_is_computed_anew_was_not_evicted():
    index = PrefixIndex()
    turn(index, 0, "old", "oooo")
    turn(index, 0, "a", "prompt")
    index.correct(turn(index, 0, "a", "prompt"), 5)
    assert index.match(chain_of("oooo"), "old") == {0: 4}
    index.correct(turn(index, 0, "a", "prompt"), 4)
    assert index.match(chain_of("oooo"), "old") == {}


def test_a_refit_clears_every_replica_and_voids_what_runs():
    index, chains = PrefixIndex(), Chains(2)
    prompt = np.arange(20, dtype=np.int32)
    old = chains.extend("t", prompt, salt_of(0, ""))[0]
    leases = [index.place(replica, "t", old) for replica in REPLICAS]
    index.clear()
    new = chains.extend("t", prompt, salt_of(1, ""))[0]
    assert index.match(old, "t") == index.match(new, "t") == {}
    index.place(0, "t", new)
    for lease in leases:
        index.correct(lease, 0)
        index.release(lease, 5)
    index.check_integrity()
    assert index.match(new, "t") == {0: 10}
    assert index.held == 10


def test_a_lost_replica_takes_nothing_from_the_others():
    index = PrefixIndex()
    lease = index.place(0, "t", chain_of("prompt and more"))
    turn(index, 1, "t", "prompt", output=2)
    index.clear(0)
    index.clear(7)
    index.release(lease)
    index.check_integrity()
    assert index.match(chain_of("prompt and more"), "t") == {1: 8}
    assert index.held == 8


def test_a_turn_is_released_once():
    index = PrefixIndex()
    lease = turn(index, 0, "t", "prompt")
    with pytest.raises(ValueError, match="released twice"):
        index.release(lease)


@pytest.mark.parametrize("capacity", [0, 300])
def test_a_stream_of_prompts_that_share_nothing_stays_bounded(capacity):
    index = PrefixIndex(max_blocks=1000, max_trajectories=50)
    index.set_capacity(0, capacity)
    index.set_capacity(1, capacity)
    rng = np.random.default_rng(0)
    for number in range(3000):
        lease = index.place(number % 2, f"t{number}", rng.integers(0, 1 << 63, 20, dtype=np.uint64))
        index.release(lease, 3)
    index.check_integrity()
    assert index.held == (600 if capacity else 1000)
    assert len(index._root.children) <= 50
    assert len(index._turns) == 50


def test_two_replicas_of_unknown_capacity_share_the_bound_evenly():
    index = PrefixIndex(max_blocks=100)
    rng = np.random.default_rng(0)
    for number in range(200):
        index.release(index.place(int(number >= 100), "t", rng.integers(0, 1 << 63, 10, dtype=np.uint64)))
    assert (index.used(0), index.used(1)) == (50, 50)
