"""What replicas tell each other: everything once, never backwards, and whatever is lost again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nemo_war.speculative.archive import decode, encode
from nemo_war.speculative.exchange import Batch, Exchange
from nemo_war.speculative.history import SuffixHistory

TEXTS = [np.random.default_rng(seed).integers(0, 500, 2000).tolist() for seed in range(8)]
JUNK = 900
"""Token ids from here on are behind a stop string: in the engine's text, and not in the host's."""


def books(replicas: int = 3, max_batch_tokens: int = 1000, **more: int) -> Exchange:
    return Exchange(range(replicas), max_batch_tokens, **more)


def turn(exchange: Exchange, name: str, replica: int, tokens: int, group: str = "g") -> None:
    exchange.placed(name, group, replica)
    exchange.finished(name, group, replica, tokens)


def test_at_the_end_of_a_step_a_trajectory_goes_once_from_its_last_replica_to_all_others():
    exchange = books()
    turn(exchange, "a", 0, 10)
    turn(exchange, "a", 1, 20)
    exchange.ended("a", 20)
    assert exchange.end_step() == [Batch(1, (0, 2), {"a": 20})]
    assert exchange.end_step() == []


def test_trajectories_that_go_the_same_way_share_a_batch_up_to_its_bound():
    exchange = books(2, max_batch_tokens=100)
    for number in range(5):
        turn(exchange, f"t{number}", 0, 40)
    turn(exchange, "other", 1, 5)
    assert exchange.end_step() == [
        Batch(0, (1,), {"t0": 40, "t1": 40}),
        Batch(0, (1,), {"t2": 40, "t3": 40}),
        Batch(0, (1,), {"t4": 40}),
        Batch(1, (0,), {"other": 5}),
    ]


def test_a_trajectory_longer_than_a_batch_stays_where_it_is_and_is_counted():
    exchange = books(max_batch_tokens=100)
    turn(exchange, "long", 0, 101)
    turn(exchange, "short", 0, 100)
    assert [batch.lengths for batch in exchange.end_step()] == [{"short": 100}]
    assert exchange.dropped == 1
    exchange.check_integrity()


def test_live_a_finished_turn_goes_to_the_replicas_that_run_siblings_and_to_no_other():
    exchange = books(4)
    exchange.placed("sibling", "g", 1)
    exchange.placed("stranger", "h", 2)
    turn(exchange, "a", 0, 10)
    assert exchange.live() == [Batch(0, (1,), {"a": 10})]
    assert exchange.live() == []


def test_what_was_told_live_is_not_told_again_at_the_end_of_the_step():
    exchange = books()
    exchange.placed("sibling", "g", 1)
    turn(exchange, "a", 0, 10)
    assert exchange.live() == [Batch(0, (1,), {"a": 10})]
    assert exchange.end_step() == [Batch(0, (2,), {"a": 10})]


def test_live_nothing_goes_to_where_all_siblings_have_ended():
    exchange = books(2)
    turn(exchange, "sibling", 1, 5)
    exchange.ended("sibling", 5)
    turn(exchange, "a", 0, 10)
    assert exchange.live() == [Batch(1, (0,), {"sibling": 5})], "only the one that still runs is told"


def test_live_the_oldest_turns_that_do_not_fit_wait_for_the_end_of_the_step_and_are_counted():
    exchange = books(2, max_batch_tokens=100)
    exchange.placed("sibling", "g", 1)
    for number in range(4):
        turn(exchange, f"t{number}", 0, 40)
    assert exchange.live() == [Batch(0, (1,), {"t2": 40, "t3": 40})]
    assert exchange.dropped == 2
    assert exchange.end_step() == [Batch(0, (1,), {"t0": 40, "t1": 40})]


def test_live_a_trajectory_longer_than_a_batch_keeps_no_other_back():
    exchange = books(2, max_batch_tokens=100)
    exchange.placed("sibling", "g", 1)
    for name, tokens in (("a", 40), ("b", 40), ("long", 101)):
        turn(exchange, name, 0, tokens)
    assert exchange.live() == [Batch(0, (1,), {"a": 40, "b": 40})]
    assert exchange.dropped == 1


def test_a_batch_that_failed_is_sent_again_to_those_who_missed_it_only():
    exchange = books()
    turn(exchange, "a", 0, 10)
    (batch,) = exchange.end_step()
    exchange.failed(batch, 2)
    assert exchange.end_step() == [Batch(0, (2,), {"a": 10})]


def test_the_failure_of_an_old_batch_does_not_undo_a_later_turn():
    exchange = books(2)
    exchange.placed("sibling", "g", 1)
    turn(exchange, "a", 0, 10)
    (batch,) = exchange.live()
    turn(exchange, "a", 1, 20)
    exchange.failed(batch, 1)
    assert exchange.end_step() == [Batch(1, (0,), {"a": 20})]


def test_the_failure_of_an_old_batch_does_not_repeat_a_later_one():
    exchange = books(2)
    exchange.placed("sibling", "g", 1)
    turn(exchange, "a", 0, 10)
    (old,) = exchange.live()
    turn(exchange, "a", 0, 20)
    (new,) = exchange.live()
    exchange.failed(old, 1)
    assert exchange.end_step() == []
    exchange.failed(new, 1)
    assert exchange.end_step() == [Batch(0, (1,), {"a": 20})]


def test_the_final_length_bounds_what_is_told():
    exchange = books(2)
    turn(exchange, "a", 0, 10)
    exchange.ended("a", 8)
    exchange.ended("never seen", 8)
    assert exchange.end_step() == [Batch(0, (1,), {"a": 8})]


def test_a_lost_replica_is_told_nothing_until_it_is_back_and_then_everything():
    exchange = books()
    turn(exchange, "a", 0, 10)
    exchange.end_step()
    exchange.lost(2)
    turn(exchange, "b", 1, 5)
    turn(exchange, "late", 2, 5)
    assert exchange.end_step() == [Batch(1, (0,), {"b": 5})]
    assert exchange.seed(2) == [Batch(0, (2,), {"a": 10}), Batch(1, (2,), {"b": 5})]
    assert exchange.end_step() == []
    exchange.check_integrity()


def test_a_peer_stands_in_for_the_replica_that_a_trajectory_ran_on_once_it_has_the_batch():
    exchange = books()
    turn(exchange, "a", 0, 10)
    (batch,) = exchange.end_step()
    exchange.lost(0)
    assert exchange.seed(0) == [], "what is on its way cannot be passed on"
    exchange.arrived(batch, 2)
    assert exchange.end_step() == [Batch(2, (0,), {"a": 10})]


def test_word_of_a_batch_that_a_replica_got_in_an_earlier_life_counts_for_nothing():
    exchange = books()
    turn(exchange, "a", 0, 10)
    (batch,) = exchange.end_step()
    exchange.lost(2)
    assert exchange.seed(2) == [Batch(0, (2,), {"a": 10})]
    exchange.arrived(batch, 2)
    exchange.lost(0)
    exchange.lost(1)
    assert exchange.seed(1) == []
    exchange.check_integrity()


def test_when_who_knew_too_much_for_a_batch_is_lost_the_others_pass_on_what_they_have():
    exchange = books(max_batch_tokens=100)
    exchange.placed("sibling", "g", 1)
    turn(exchange, "a", 0, 90)
    (batch,) = exchange.live()
    exchange.arrived(batch, 1)
    turn(exchange, "a", 0, 120)
    assert exchange.end_step() == []
    exchange.lost(0)
    exchange.check_integrity()
    assert exchange.end_step() == [Batch(1, (2,), {"a": 90})]


def test_beyond_the_bound_the_name_that_is_longest_unchanged_is_forgotten_and_counted_if_it_was_due():
    exchange = books(2, max_names=2)
    turn(exchange, "a", 0, 10)
    turn(exchange, "b", 0, 10)
    turn(exchange, "a", 0, 12)
    turn(exchange, "c", 0, 10)
    assert exchange.dropped == 1
    assert [list(batch.lengths) for batch in exchange.end_step()] == [["a", "c"]]
    turn(exchange, "d", 0, 10)
    assert exchange.dropped == 1, "everybody knew what was forgotten"
    exchange.check_integrity()


def test_after_all_histories_were_emptied_nothing_is_known():
    exchange = books()
    turn(exchange, "a", 0, 10)
    exchange.clear()
    assert exchange.end_step() == []


@dataclass
class Running:
    replica: int
    slot: int


class Sharing(RuleBasedStateMachine):
    """Replicas with real histories, and a network that loses, repeats and reorders what they send.

    `truth` is the text as the host knows it; histories may have JUNK behind it, as where a stop
    string ended a turn. Texts of a group share their beginning.
    """

    REPLICAS, MAX_BATCH_TOKENS, MAX_NAMES, MAX_TOKENS = 3, 1000, 1000, 8192

    def __init__(self) -> None:
        super().__init__()
        self.exchange = Exchange(range(self.REPLICAS), self.MAX_BATCH_TOKENS, self.MAX_NAMES)
        self.histories = [self.empty() for _ in range(self.REPLICAS)]
        self.down: set[int] = set()
        self.truth: dict[str, list[int]] = {}
        self.open: list[str] = []
        self.running: dict[str, Running] = {}
        self.lives = [0] * self.REPLICAS
        self.flying: list[
            tuple[Batch, int, int, bytes]
        ] = []  # the int behind the target: in which of its lives
        self.told: dict[tuple[int, str], int] = {}  # tokens, by turns that finished there and by batches

    def empty(self) -> SuffixHistory:
        return SuffixHistory(self.MAX_TOKENS, 4, max_live=16)

    # What happens on replicas

    @rule(data=st.data(), group=st.integers(0, 1))
    def begin(self, data, group):
        up = [each for each in range(self.REPLICAS) if each not in self.down]
        waiting = [name for name in self.open if name not in self.running]
        if len(waiting) < 2:
            name = f"g{group}/{len(self.truth)}"
            self.truth[name] = TEXTS[group][:70]
            self.open.append(name)
            waiting.append(name)
        if up and len(self.running) < 8:
            name, replica = data.draw(st.sampled_from(waiting)), data.draw(st.sampled_from(up))
            self.truth[name] += TEXTS[2 + len(self.truth) % 6][: data.draw(st.integers(1, 70))]
            tokens = np.array(self.truth[name], np.int32)
            slot = self.histories[replica].begin(name, name[:2], 0, tokens)
            self.running[name] = Running(replica, slot)
            self.exchange.placed(name, name[:2], replica)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 70), junk=st.integers(0, 3), fails=st.booleans())
    def finish(self, data, count, junk, fails):
        name = data.draw(st.sampled_from(sorted(self.running)))
        turn = self.running.pop(name)
        new = [] if fails else TEXTS[len(self.truth[name]) % 8][:count]
        said = np.array([[*new, *[JUNK + len(self.truth)] * junk]], np.int32)
        history = self.histories[turn.replica]
        history.extend(np.array([turn.slot], np.int32), said, np.array([said.shape[1]], np.int32))
        history.end(turn.slot)
        self.truth[name] = [*self.truth[name], *new]
        if not fails:
            self.exchange.finished(name, name[:2], turn.replica, len(self.truth[name]))
            self.told[turn.replica, name] = len(self.truth[name])

    @precondition(lambda self: any(name not in self.running for name in self.open))
    @rule(data=st.data())
    def end(self, data):
        name = data.draw(st.sampled_from([name for name in self.open if name not in self.running]))
        self.open.remove(name)
        self.exchange.ended(name, len(self.truth[name]))

    @precondition(lambda self: len(self.down) < 2)
    @rule(replica=st.integers(0, 2))
    def lose(self, replica):
        self.histories[replica] = self.empty()
        self.lives[replica] += 1
        self.down.add(replica)
        self.exchange.lost(replica)
        self.running = {name: each for name, each in self.running.items() if each.replica != replica}
        self.told = {key: length for key, length in self.told.items() if key[0] != replica}

    @precondition(lambda self: self.down)
    @rule(data=st.data())
    def come_back(self, data):
        replica = data.draw(st.sampled_from(sorted(self.down)))
        self.down.remove(replica)
        self.send(self.exchange.seed(replica))

    # What becomes of what they send

    def send(self, batches: list[Batch]) -> None:
        for batch in batches:
            assert batch.tokens <= self.MAX_BATCH_TOKENS
            assert batch.source not in {*batch.targets, *self.down}
            history = self.histories[batch.source]
            blob = encode(history.export_sequences(batch.lengths).cut(batch.lengths))
            self.flying += [(batch, target, self.lives[target], blob) for target in batch.targets]

    def arrive(self, index: int, *, stays: bool, reported: bool = True) -> None:
        batch, target, life, blob = self.flying[index] if stays else self.flying.pop(index)
        if target not in self.down:
            history, sequences = self.histories[target], decode(blob, "test")
            live = {
                name: self.text(target, name) for name, turn in self.running.items() if turn.replica == target
            }
            history.import_sequences(sequences)
            assert history.import_sequences(sequences) == 0, "an import twice is an import once"
            assert all(self.text(target, name) == text for name, text in live.items()), (
                "a live turn was touched"
            )
            if reported:
                self.exchange.arrived(batch, target)
            for name, length in batch.lengths.items() if reported and life == self.lives[target] else ():
                if name not in live:
                    self.told[target, name] = max(length, self.told.get((target, name), 0))

    @rule()
    def tell_live(self):
        self.send(self.exchange.live())

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), again=st.booleans())
    def deliver(self, data, again):
        self.arrive(data.draw(st.integers(0, len(self.flying) - 1)), stays=again)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), although_it_arrived=st.booleans())
    def fail(self, data, although_it_arrived):
        index = data.draw(st.integers(0, len(self.flying) - 1))
        batch, target, *_ = self.flying[index]
        if although_it_arrived:
            self.arrive(index, stays=True, reported=False)
        del self.flying[index]
        self.exchange.failed(batch, target)

    @rule(data=st.data())
    def end_step(self, data):
        while self.running:
            self.finish(data, 3, 1, False)
        for name in self.open:
            self.exchange.ended(name, len(self.truth[name]))
        self.open.clear()
        for history in self.histories:
            for name, text in self.truth.items():
                history.cut(name, len(text))
        self.settle(data)
        self.send(self.exchange.end_step())
        self.settle(data)
        self.everyone_knows_what_anyone_knows()

    def settle(self, data) -> None:
        while self.flying:
            self.arrive(data.draw(st.integers(0, len(self.flying) - 1)), stays=False)

    def everyone_knows_what_anyone_knows(self) -> None:
        up = [each for each in range(self.REPLICAS) if each not in self.down]
        for name in self.truth:
            told = [self.told.get((replica, name), 0) for replica in up]
            assert len(set(told)) == 1, f"{name} was told up to {told} tokens"

    # What always holds

    def text(self, replica: int, name: str) -> list[int]:
        return self.histories[replica].export_sequences({name}).tokens.tolist()

    def right(self, replica: int, name: str) -> int:
        """How much of the true text a replica knows."""
        text, truth = self.text(replica, name), self.truth[name]
        size = min(len(text), len(truth))
        return next((at for at in range(size) if text[at] != truth[at]), size)

    @invariant()
    def the_books_are_sound_and_bounded(self):
        self.exchange.check_integrity()
        assert len(self.exchange._known) <= self.MAX_NAMES

    @invariant()
    def histories_are_sound_and_no_replica_unlearns(self):
        for history in self.histories:
            history.check_integrity()
        for (replica, name), length in self.told.items():
            assert self.right(replica, name) >= length, "a shorter text replaced a longer one"


class Cramped(Sharing):
    """The same with books, batches and histories that are far too small: much is left out, nothing breaks."""

    MAX_BATCH_TOKENS, MAX_NAMES, MAX_TOKENS = 200, 3, 512

    def everyone_knows_what_anyone_knows(self) -> None:
        """Not here."""

    @invariant()
    def histories_are_sound_and_no_replica_unlearns(self):
        for history in self.histories:
            history.check_integrity()
            assert history.stats().tokens <= self.MAX_TOKENS


Sharing.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
Cramped.TestCase.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestWhateverTheNetworkDoesAllKnowEverythingInTheEnd = Sharing.TestCase
TestBoundsHoldAndNothingBreaksWhereLittleFits = Cramped.TestCase
