"""What a suffix history keeps, forgets and tells nobody."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nemo_war.speculative import arena, calibration, index
from nemo_war.speculative.history import SuffixHistory, warm_up

K = 6
TEXT = np.random.default_rng(0).integers(0, 500, 400).astype(np.int32)
SECRET = 1000


def rows(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def texts(history: SuffixHistory) -> dict[str, list[int]]:
    return {each.trajectory: each.tokens.tolist() for each in history.export_sequences().rows()}


def begin(
    history: SuffixHistory, name: str, tokens, group: str = "g", epoch: int = 0, learn: bool = True
) -> int:
    return history.begin(name, group, epoch, np.asarray(tokens, np.int32), learn)


def feed(history: SuffixHistory, slot: int, tokens: list[int]) -> None:
    history.extend(rows(slot), np.array([tokens], np.int32), rows(len(tokens)))


def draft(history: SuffixHistory, slot: int) -> list[int]:
    drafts = history.draft(rows(slot), rows(K), 0)
    return drafts.tokens[0, : drafts.lengths[0]].tolist()


class Life(RuleBasedStateMachine):
    """Turns begin, grow, end and are cut in any order; the oracle is a dictionary of lists.

    Prompts start with one of two long texts, so that pages are shared. Names that start
    with `v` are validation: their tokens from SECRET on may never come up elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.history = SuffixHistory(1024, K, max_live=4)
        self.tokens: dict[str, list[int]] = {}
        self.live: dict[str, int] = {}
        self.ended: list[str] = []

    @rule(
        name=st.sampled_from([f"{kind}{number}" for kind in "tv" for number in range(6)]),
        base=st.sampled_from([0, 150]),
        length=st.integers(0, 200),
        more=st.lists(st.integers(0, 9), max_size=8),
        diverge=st.booleans(),
    )
    def begin(self, name, base, length, more, diverge):
        old = self.tokens.get(name, [])
        tokens = [*old, *more] if old and not diverge else [*TEXT[base : base + length].tolist(), *more]
        if name.startswith("v"):
            tokens = [*tokens, *(SECRET + token for token in more)]
        slot = begin(self.history, name, tokens, group=f"g{int(name[1]) % 2}", learn=name.startswith("t"))
        if slot < 0:
            assert len(self.live) == 4
            assert name not in self.live
            return
        self.live[name], self.tokens[name] = slot, tokens
        if name in self.ended:
            self.ended.remove(name)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 7))
    def extend_all(self, data, count):
        names = sorted(self.live)
        fresh = [data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)) for _ in names]
        fresh = [[t + SECRET * n.startswith("v") for t in row] for n, row in zip(names, fresh, strict=True)]
        slots = rows(*(self.live[name] for name in names))
        self.history.extend(slots, np.array(fresh, np.int32), np.full(len(names), count, np.int32))
        for name, row in zip(names, fresh, strict=True):
            self.tokens[name] = self.tokens[name] + row

    @precondition(lambda self: self.live)
    @rule()
    def draft_all(self):
        names = sorted(self.live)
        drafts = self.history.draft(rows(*(self.live[n] for n in names)), np.full(len(names), K, np.int32), 0)
        for name, tokens in zip(names, drafts.tokens, strict=True):
            own = set(self.tokens[name])
            assert all(token < SECRET or token in own for token in tokens.tolist()), (
                "a validation token got out"
            )

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data):
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.history.end(self.live.pop(name))
        if name.startswith("t"):
            self.ended.append(name)
        else:
            del self.tokens[name]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def cut(self, data):
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        stored = texts(self.history).get(name)
        if stored is None or name.startswith("v"):
            return
        length = data.draw(st.integers(0, len(stored)))
        self.history.cut(name, length)
        if length < len(stored):
            self.tokens[name] = self.tokens[name][:length]

    @invariant()
    def stored_is_what_was_said(self):
        self.history.check_integrity()
        stored = texts(self.history)
        for name, tokens in stored.items():
            assert tokens == self.tokens[name][: len(tokens)]
        kept = [name for name in self.ended if name in stored]
        written = [name for name in self.ended if self.tokens[name]]
        assert kept == written[len(written) - len(kept) :], "not the oldest was evicted"
        assert all(name in stored for name in self.live if name.startswith("t"))
        assert self.history.stats().tokens <= 1024


Life.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestAnyOrderOfEventsKeepsWhatWasSaid = Life.TestCase


def test_a_hundred_steps_of_fresh_prompts_keep_memory_flat():
    history = SuffixHistory(20_000, K)
    rng = np.random.default_rng(0)
    sizes = set()
    for step in range(100):
        slots = [begin(history, f"{step}/{i}", rng.integers(0, 5000, 500), f"{step}") for i in range(8)]
        for _ in range(5):
            history.draft(rows(*slots), np.full(8, K, np.int32), step)
            history.extend(
                rows(*slots), rng.integers(0, 5000, (8, 7)).astype(np.int32), np.full(8, 7, np.int32)
            )
        for slot in slots:
            history.end(slot)
        history.advance_epoch(step + 1)
        stats = history.stats()
        sizes.add(stats.bytes)
        assert stats.tokens <= 20_032
        assert stats.trajectories <= 40
    assert len(sizes) == 1
    assert stats.evictions >= 700
    history.check_integrity()


def test_a_prompt_that_siblings_share_is_stored_once():
    history = SuffixHistory(20_000, K)
    for number in range(8):
        begin(history, f"t{number}", TEXT[:320])
    assert history.stats().tokens == 320
    history.check_integrity()


def test_shared_pages_outlive_the_trajectory_that_wrote_them():
    history = SuffixHistory(640, K)
    history.end(begin(history, "first", TEXT[:200]))
    second = begin(history, "second", TEXT[:220])
    begin(history, "large", np.arange(350) + 600)
    assert list(texts(history)) == ["second", "large"]
    assert texts(history)["second"] == TEXT[:220].tolist()
    feed(history, second, [1, 2])
    history.check_integrity()


def test_live_turns_beyond_the_budget_are_not_stored_but_drafted_for():
    history = SuffixHistory(1024, K)
    slot = begin(history, "long", np.tile(TEXT, 4))
    assert history.stats().tokens == 1024
    feed(history, slot, TEXT[:5].tolist())
    assert draft(history, slot) == TEXT[5 : 5 + K].tolist()
    history.check_integrity()


def test_beginning_again_with_more_stores_only_what_is_new():
    history = SuffixHistory(4096, K)
    history.end(begin(history, "a", TEXT[:100]))
    slot = begin(history, "a", TEXT[:300])
    assert begin(history, "a", TEXT[:300]) == slot
    assert texts(history) == {"a": TEXT[:300].tolist()}
    assert history.stats().tokens == 300


def test_tokens_behind_a_stop_string_are_forgotten_at_the_next_turn():
    history = SuffixHistory(4096, K)
    slot = begin(history, "a", TEXT[:100])
    feed(history, slot, [7, 8, 9])
    history.end(slot)
    prompt = [*TEXT[:100].tolist(), 7, 400, 401]
    begin(history, "a", prompt)
    assert texts(history) == {"a": prompt}
    history.check_integrity()


def test_a_live_turn_goes_on_from_where_it_was_cut():
    history = SuffixHistory(4096, K)
    history.end(begin(history, "old", TEXT))
    slot = begin(history, "new", TEXT[:100])
    feed(history, slot, [7, 8, 9])
    history.cut("new", 100)
    assert draft(history, slot) == TEXT[100 : 100 + K].tolist()
    feed(history, slot, [5])
    assert texts(history)["new"] == [*TEXT[:100].tolist(), 5]


def test_cutting_a_shared_page_leaves_the_others_alone():
    history = SuffixHistory(4096, K)
    history.end(begin(history, "a", TEXT[:200]))
    history.end(begin(history, "b", TEXT[:200]))
    history.cut("b", 70)
    assert texts(history) == {"a": TEXT[:200].tolist(), "b": TEXT[:70].tolist()}
    history.check_integrity()


def test_a_trajectory_that_is_cut_to_nothing_is_gone():
    history = SuffixHistory(4096, K)
    history.end(begin(history, "a", TEXT[:200]))
    history.cut("a", 0)
    history.cut("never seen", 3)
    assert history.stats().trajectories == 0
    history.check_integrity()


def test_validation_drafts_from_itself_and_leaves_nothing():
    history = SuffixHistory(4096, K)
    slot = begin(history, "v", np.tile(TEXT[:50], 3), learn=False)
    assert draft(history, slot) == TEXT[:K].tolist()
    other = begin(history, "t", TEXT[:50])
    assert draft(history, other) == []
    history.end(slot)
    assert list(texts(history)) == ["t"]
    assert history.stats().tokens == 50


def test_a_shared_page_does_not_lead_into_a_validation_text():
    history = SuffixHistory(4096, K)
    history.end(begin(history, "a", TEXT[:64]))
    validation = begin(history, "v", [*TEXT[:64].tolist(), *range(SECRET, SECRET + 9)], learn=False)
    other = begin(history, "b", TEXT[:64])
    assert draft(history, other) == []
    history.end(validation)
    assert history.stats().tokens == 64
    history.check_integrity()


def test_trajectories_older_than_max_epochs_are_forgotten_at_a_refit():
    history = SuffixHistory(4096, K, max_epochs=2)
    for epoch in range(4):
        history.end(begin(history, f"t{epoch}", TEXT[epoch:], epoch=epoch))
    live = begin(history, "t0", TEXT, epoch=0)
    history.advance_epoch(4)
    assert set(texts(history)) == {"t0", "t2", "t3"}
    history.end(live)
    assert history.stats().epochs == 3


def test_turns_beyond_max_live_get_a_void_slot_that_all_calls_ignore():
    history = SuffixHistory(4096, K, max_live=1)
    begin(history, "a", TEXT)
    slot = begin(history, "b", TEXT)
    assert slot == -1
    assert draft(history, slot) == []
    feed(history, slot, [1])
    history.end(slot)
    assert history.stats().trajectories == 1


def test_clearing_voids_live_slots():
    history = SuffixHistory(4096, K)
    slot = begin(history, "a", TEXT)
    history.clear()
    feed(history, slot, [1])
    assert draft(history, slot) == []
    history.end(slot)
    assert history.stats().tokens == 0
    history.check_integrity()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=6))
def test_importing_twice_is_importing_once(spans):
    source, target = SuffixHistory(8192, K), SuffixHistory(8192, K)
    for number, span in enumerate(spans):
        history = source
        history.end(begin(history, f"t{number}", TEXT[min(span) : max(span)], f"g{number % 2}", epoch=number))
    sequences = source.export_sequences()
    assert target.import_sequences(sequences) == len(sequences.trajectories)
    assert target.import_sequences(sequences) == 0
    assert texts(target) == texts(source)
    assert target.export_sequences().epochs.tolist() == sequences.epochs.tolist()
    assert target.export_sequences().groups == sequences.groups
    target.check_integrity()


def test_what_was_sampled_is_still_told_from_what_was_given_after_an_import():
    source, target = SuffixHistory(4096, K), SuffixHistory(4096, K)
    slot = begin(source, "a", TEXT[:70])
    feed(source, slot, [1, 2, 3])
    begin(source, "b", TEXT[:64])
    source.end(slot)
    source.cut("a", 72)
    expected = [False] * 70 + [True] * 2
    assert next(source.export_sequences({"a"}).rows()).sampled.tolist() == expected
    target.import_sequences(source.export_sequences())
    assert next(target.export_sequences({"a"}).rows()).sampled.tolist() == expected


def test_an_import_leaves_a_running_turn_alone():
    source, target = SuffixHistory(4096, K), SuffixHistory(4096, K)
    source.end(begin(source, "a", TEXT[:200]))
    begin(target, "a", TEXT[:50])
    assert target.import_sequences(source.export_sequences()) == 0
    assert texts(target) == {"a": TEXT[:50].tolist()}


def test_a_longer_text_of_a_trajectory_that_is_known_is_taken_in_and_a_shorter_one_is_not():
    source, target = SuffixHistory(4096, K), SuffixHistory(4096, K)
    for length, taken in ((100, 1), (250, 1), (180, 0)):
        source.end(begin(source, "a", TEXT[:length]))
        assert target.import_sequences(source.export_sequences().cut({"a": length})) == taken
    assert texts(target) == {"a": TEXT[:250].tolist()}
    target.check_integrity()


def test_final_text_takes_the_place_of_drafts_behind_a_stop_string_though_these_be_longer():
    source, target = SuffixHistory(4096, K), SuffixHistory(4096, K)
    slot = begin(target, "a", TEXT[:100])
    feed(target, slot, [1, 2, 3, 4])
    target.end(slot)
    source.end(begin(source, "a", TEXT[:102]))
    assert target.import_sequences(source.export_sequences()) == 1
    assert texts(target) == {"a": TEXT[:102].tolist()}
    target.check_integrity()


def test_an_import_pushes_out_what_ended_longest_ago_and_no_running_turn():
    source, target = SuffixHistory(8192, K), SuffixHistory(512, K)
    target.end(begin(target, "old", np.arange(128) + 600))
    begin(target, "live", np.arange(128) + 800)
    source.end(begin(source, "a", TEXT[:300]))
    source.end(begin(source, "too long", TEXT[1:]))
    source.end(begin(source, "longer than all", np.tile(TEXT, 4)))
    assert target.import_sequences(source.export_sequences({"a", "longer than all"})) == 1
    assert set(texts(target)) == {"live", "a"}
    target.import_sequences(source.export_sequences({"too long"}))
    assert texts(target)["live"] == list(range(800, 928))
    target.check_integrity()


def test_an_import_keeps_to_the_share_of_a_group():
    source, target = SuffixHistory(8192, K), SuffixHistory(8192, K, max_group_tokens=250)
    for number in range(4):
        source.end(begin(source, f"t{number}", np.arange(100) + 100 * number))
    target.end(begin(target, "other", np.arange(200) + 600, group="h"))
    assert target.import_sequences(source.export_sequences()) == 4
    assert list(texts(target)) == ["other", "t2", "t3"]
    target.check_integrity()


def test_names_can_be_chosen_for_an_export():
    history = SuffixHistory(4096, K)
    for name in "abc":
        history.end(begin(history, name, TEXT[:10]))
    assert history.export_sequences({"b"}).trajectories == ("b",)


def test_a_draft_ends_where_the_output_it_copies_ended():
    history = SuffixHistory(4096, K)
    slot = begin(history, "first", TEXT[:50])
    feed(history, slot, [901, 902, 903, 904])
    history.end(slot)
    history.end(begin(history, "first", [*TEXT[:50], 901, 902, 903, 904, 905, 906, 907]))
    slot = begin(history, "second", TEXT[:50])
    feed(history, slot, [901, 902])
    assert draft(history, slot) == [903, 904]
    copied = begin(history, "third", [*TEXT[100:120], 903, 904, 905])
    assert draft(history, copied) == [906, 907], "what was given is copied on"


def test_nothing_is_compiled_after_the_warm_up():
    warm_up()
    kernels = [each for module in (arena, calibration, index) for each in vars(module).values()]
    kernels = [each for each in kernels if hasattr(each, "signatures")]
    before = [len(each.signatures) for each in kernels]
    history = SuffixHistory(4096, K)
    frozen = TEXT[:100].copy()
    frozen.flags.writeable = False
    for length in (100, 60, 100):
        slot = history.begin("a", "g", 0, frozen[:length])
        draft(history, slot)
        feed(history, slot, [1])
        history.cut("a", 90)
        history.end(slot)
    sequences = history.export_sequences()
    history.clear()
    sequences.tokens.flags.writeable = sequences.sampled.flags.writeable = False
    history.import_sequences(sequences)
    assert [len(each.signatures) for each in kernels] == before


@pytest.mark.parametrize("flaw", ["fill", "reference", "chain"])
def test_the_integrity_check_names_what_is_wrong(flaw):
    history = SuffixHistory(4096, K)
    begin(history, "a", TEXT[:100])
    if flaw == "chain":
        history._arena.links[5, 0] = 90
    else:
        history._arena.pages[history._in_slot[0].tail, {"fill": 5, "reference": 4}[flaw]] += 1
    with pytest.raises(AssertionError, match="suffix history: "):
        history.check_integrity()
