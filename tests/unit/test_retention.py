"""What a history forgets: by tokens, by epochs, by the share of a group."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_war.config import HistoryConfig
from nemo_war.speculative import calibration, index
from nemo_war.speculative.history import SuffixHistory


def remember(history: SuffixHistory, name: str, group: str, tokens: int, epoch: int = 0) -> None:
    text = np.random.default_rng(abs(hash(name)) % 2**32).integers(0, 1000, tokens).astype(np.int32)
    history.end(history.begin(name, group, epoch, text))


def names(history: SuffixHistory) -> list[str]:
    return list(history.export_sequences().trajectories)


def test_a_group_beyond_its_share_loses_its_own_oldest_and_nobody_elses():
    history = SuffixHistory(100_000, 4, max_group_tokens=500)
    remember(history, "other", "quiet", 300)
    for number in range(4):
        remember(history, f"t{number}", "loud", 200)
    assert names(history) == ["other", "t2", "t3"]
    history.check_integrity()


def test_the_latest_trajectory_stays_though_it_alone_exceeds_the_share():
    history = SuffixHistory(100_000, 4, max_group_tokens=100)
    remember(history, "small", "g", 50)
    remember(history, "large", "g", 1000)
    assert names(history) == ["large"]


def test_live_trajectories_do_not_count_and_are_not_forgotten():
    history = SuffixHistory(100_000, 4, max_group_tokens=300)
    slots = [history.begin(f"t{i}", "g", 0, np.arange(200, dtype=np.int32) + 200 * i) for i in range(3)]
    assert len(names(history)) == 3
    for slot in slots:
        history.end(slot)
    assert names(history) == ["t2"]
    history.check_integrity()


def test_a_trajectory_that_was_cut_counts_for_what_is_left():
    history = SuffixHistory(100_000, 4, max_group_tokens=500)
    remember(history, "a", "g", 400)
    history.cut("a", 100)
    remember(history, "b", "g", 350)
    assert names(history) == ["a", "b"]
    history.check_integrity()


def test_a_cut_in_a_full_history_does_not_make_room_of_what_it_cuts():
    history = SuffixHistory(256, 4)
    remember(history, "old", "g", 100)
    slot = history.begin("live", "g", 0, np.arange(128, dtype=np.int32))
    history.cut("old", 50)
    history.check_integrity()
    assert [len(each.tokens) for each in history.export_sequences().rows()] == [50, 128]
    history.end(slot)


def test_a_cut_of_a_live_turn_keeps_how_its_drafts_did():
    history = SuffixHistory(4096, 4)
    slot = history.begin("t", "g", 0, np.arange(100, dtype=np.int32) % 7)
    slots, one = np.array([slot], np.int32), np.ones(1, np.int32)
    for _ in range(12):  # it repeats itself, and is drafted rightly
        history.draft(slots, 4 * one, 0)
        history.extend(slots, np.full((1, 1), 900, np.int32), one)
    before = history._slots.state[slot, index.FORM]
    history.cut("t", 105)
    assert history._slots.state[slot, index.FORM] == before > calibration.FIRST_FORM


def test_without_a_share_one_group_may_fill_the_history():
    history = SuffixHistory(100_000, 4)
    for number in range(20):
        remember(history, f"t{number}", "g", 500)
    assert len(names(history)) == 20


def test_the_share_is_given_of_the_budget():
    assert HistoryConfig(max_tokens=2000, max_group_share=0.25).max_group_tokens == 500
    assert HistoryConfig().max_group_tokens is None


steps = st.lists(
    st.tuples(st.sampled_from(["begin", "end", "cut"]), st.integers(0, 5), st.integers(1, 300)), max_size=40
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_whatever_happens_the_groups_add_up_and_keep_to_their_share(done):
    history, live = SuffixHistory(2000, 4, max_group_tokens=400), {}
    for act, number, size in done:
        name, group = f"t{number}", f"g{number % 2}"
        if act == "begin":
            live[name] = history.begin(name, group, 0, np.arange(size, dtype=np.int32))
        elif act == "end" and name in live:
            history.end(live.pop(name))
        elif act == "cut":
            history.cut(name, size // 2)
        history.check_integrity()
    for slot in live.values():
        history.end(slot)
    held = history.export_sequences()
    for group in set(held.groups):
        sizes = [int(n) for n, g in zip(np.diff(held.offsets), held.groups, strict=True) if g == group]
        assert len(sizes) == 1 or sum(sizes) <= 400
