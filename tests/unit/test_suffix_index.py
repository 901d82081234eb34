"""The suffix index against short pure-Python oracles."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from nemo_war.speculative import arena as pages
from nemo_war.speculative import calibration as calibrations
from nemo_war.speculative import index as suffixes
from nemo_war.speculative.history import SuffixHistory

K = 8
texts = st.lists(st.integers(0, 7), min_size=0, max_size=14)
stories = st.lists(st.tuples(st.sampled_from("gh"), texts), min_size=1, max_size=5)


def remember(history: SuffixHistory, stored: list[tuple[str, list[int]]]) -> None:
    for number, (group, tokens) in enumerate(stored):
        slot = history.begin(f"t{number}", group, 0, np.array(tokens, np.int32))
        history.end(slot)


def draft(history: SuffixHistory, slot: int, budget: int = K, epoch: int = 0) -> list[int]:
    drafts = history.draft(np.array([slot], np.int32), np.array([budget], np.int32), epoch)
    return drafts.tokens[0, : drafts.lengths[0]].tolist()


def feed(history: SuffixHistory, slot: int, tokens: list[int]) -> None:
    history.extend(
        np.array([slot], np.int32), np.array([tokens], np.int32), np.array([len(tokens)], np.int32)
    )


def common_suffix(left: list[int], right: list[int]) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[-1 - length] == right[-1 - length]:
        length += 1
    return length


def places(stored: list[tuple[str, list[int]]], group: str, context: list[int]) -> list[tuple[int, int]]:
    """Oracle of the search: (matched length, next token) of every place that is worth a look."""
    found = []
    for its_group, tokens in [*stored, (group, context)]:
        for end in range(1, len(tokens)):
            length = common_suffix(tokens[:end], context)
            if length >= (1 if its_group == group else 2):
                found.append((length, tokens[end]))
    return sorted(found)


@settings(max_examples=150, deadline=None)
@given(stories, texts)
def test_the_search_finds_every_place_with_the_same_context_and_its_exact_length(stored, context):
    expected = places(stored, "g", context)
    assume(len(expected) <= suffixes.MAX_VISITS // 2)
    history = SuffixHistory(4096, K)
    remember(history, stored)
    slot = history.begin("live", "g", 0, np.array(context, np.int32))
    draft(history, slot)
    cursors = history._slots.cursors[slot, : history._slots.state[slot, suffixes.CURSORS]]
    matches, recovering = Counter(), Counter()
    for cursor in cursors:
        kind = recovering if cursor[suffixes.WRONG] else matches
        kind[int(cursor[suffixes.LENGTH]), int(history._arena.tokens[cursor[suffixes.AT]])] += 1
    assert matches <= Counter(expected) <= matches + recovering


def weight_of(history: SuffixHistory, state: np.ndarray, cursor: np.ndarray, epoch: int) -> float:
    kind = suffixes.kind_of(history._arena, state, cursor[suffixes.AT]) + calibrations.RECOVERING * int(
        cursor[suffixes.WRONG] > 0
    )
    age = suffixes.age_of(history._arena, cursor[suffixes.AT], epoch)
    return calibrations.weight_of(history.calibration.trust, kind, cursor[suffixes.LENGTH], age)


def voted(history: SuffixHistory, slot: int, budget: int, epoch: int) -> tuple[list[int], list[float]]:
    """Oracle of the vote, from the cursors a draft left behind; rejects what hangs on rounding."""
    arena, state, calibration = history._arena, history._slots.state[slot], history.calibration
    cursors = history._slots.cursors[slot, : state[suffixes.CURSORS]].copy()
    left = [
        (float(weight_of(history, state, c, epoch)), index, int(c[suffixes.AT]))
        for index, c in enumerate(cursors)
    ]
    tokens, survival, alive = [], [], 1.0
    while left and len(tokens) < budget:
        votes: dict[int, float] = {}
        for weight, _, at in left:
            votes[int(arena.tokens[at])] = votes.get(int(arena.tokens[at]), 0.0) + weight
        token = max(votes, key=votes.__getitem__)
        share = votes[token] / sum(votes.values())
        assume(min(abs(1 - share - edge) for edge in (0.02, 0.07, 0.2, 0.4, 0.6)) > 1e-4)
        assume(sorted([0, *votes.values()])[-2] < 0.9999 * votes[token])
        left = [each for each in left if arena.tokens[each[2]] == token]
        _, leader, at = max(left, key=lambda each: each[0])
        kind = suffixes.kind_of(arena, state, at) + calibrations.RECOVERING * int(
            cursors[leader, suffixes.WRONG] > 0
        )
        length = int(cursors[leader, suffixes.LENGTH]) + len(tokens)
        cell = calibrations.cell_of(
            kind, length, np.float32(share), len(left), len(tokens), int(state[suffixes.FORM])
        )
        alive *= float(calibrations.acceptance(calibration, cell))
        if alive < suffixes.SURVIVAL_FLOOR:
            break
        tokens.append(token)
        survival.append(alive)
        after = int(suffixes.position_after(arena, at))
        if suffixes.is_sampled(arena, at) and after >= 0 and not suffixes.is_sampled(arena, after):
            break
        left = [(w, i, int(suffixes.position_after(arena, at))) for w, i, at in left]
        left = [each for each in left if each[2] >= 0]
    return tokens, survival


@example([("g", [0, 0]), ("g", [0, 0, 0, 0])], [], 3, 0, [0, 0, 0, 2, 1, 0, 1, 2, 0, 0])  # votes of 1e-5
@settings(max_examples=100, deadline=None)
@given(
    stories, texts, st.integers(0, K), st.integers(0, 6), st.lists(st.integers(0, 3), min_size=1, max_size=30)
)
def test_a_draft_is_the_weighted_vote_of_the_places_found(stored, context, budget, epoch, more):
    history = SuffixHistory(4096, K)
    remember(history, stored)
    slot = history.begin("live", "g", epoch, np.array(context, np.int32))
    for start in range(0, len(more), 3):
        drafted = history.draft(np.array([slot], np.int32), np.array([budget], np.int32), epoch)
        length = drafted.lengths[0]
        tokens, survival = voted(history, slot, budget, epoch)
        assert drafted.tokens[0, :length].tolist() == tokens
        np.testing.assert_allclose(drafted.survival[0, :length], survival, rtol=1e-3)
        assert length <= budget
        assert (drafted.survival[0, length:] == 0).all()
        assert (np.diff(drafted.survival[0]) <= 0).all()
        feed(history, slot, more[start : start + 3])


def test_a_repeated_text_is_drafted_as_it_was():
    text = np.random.default_rng(0).integers(0, 5000, 500)
    history = SuffixHistory(4096, K)
    remember(history, [("g", text.tolist())])
    slot = history.begin("live", "g", 0, text[:250].astype(np.int32))
    assert draft(history, slot) == text[250 : 250 + K].tolist()


def test_a_copy_goes_on_behind_an_exchanged_token():
    text = np.random.default_rng(0).integers(0, 5000, 500).tolist()
    history = SuffixHistory(4096, K)
    remember(history, [("g", text)])
    slot = history.begin("live", "g", 0, np.array(text[:250], np.int32))
    draft(history, slot)
    feed(history, slot, [9999])
    assert draft(history, slot, budget=2) == text[251:253]


def test_a_sibling_outvotes_a_stranger_that_matches_as_well():
    history = SuffixHistory(4096, K)
    remember(history, [("g", [1, 2, 3, 4, 5]), ("other", [1, 2, 3, 4, 6])])
    slot = history.begin("live", "g", 0, np.array([1, 2, 3, 4], np.int32))
    assert draft(history, slot, budget=1) == [5]


def test_newer_epochs_win_when_older_ones_turn_out_wrong():
    history = SuffixHistory(100_000, K)
    rng = np.random.default_rng(0)
    for number in range(60):
        stem = rng.integers(10, 5000, 8).tolist()
        for name, epoch, ending in ((f"old{number}", 0, 7), (f"new{number}", 5, 8)):
            history.end(history.begin(name, "x", epoch, np.array([*stem, ending], np.int32)))
        slot = history.begin(f"live{number}", "g", 6, np.array(stem, np.int32))
        last = draft(history, slot, budget=1, epoch=6)
        feed(history, slot, [8])
        history.end(slot)
    assert last == [8]


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_draft_is_never_longer_than_its_budget(budget):
    history = SuffixHistory(4096, K)
    slot = history.begin("a", "g", 0, np.array([1, 2, 3, 4, 5, 6] * 5, np.int32))
    assert len(draft(history, slot, budget)) == budget


def test_rows_of_void_slots_are_left_out_of_a_batch():
    history = SuffixHistory(4096, K)
    slot = history.begin("a", "g", 0, np.array([1, 2, 3, 4, 5, 6] * 5, np.int32))
    rows = np.array([-1, slot, -1], np.int32)
    history.extend(rows, np.ones((3, 1), np.int32), np.ones(3, np.int32))
    drafts = history.draft(rows, np.full(3, K, np.int32), 0)
    assert drafts.lengths.tolist() == [0, K, 0]
    assert drafts.tokens[1].tolist() == ([2, 3, 4, 5, 6, 1] * 2)[:K]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_cursor_stands_behind_the_context_it_claims(data):
    history = SuffixHistory(1024, K)
    base = np.random.default_rng(1).integers(0, 6, 300).astype(np.int32)
    live: dict[int, list[int]] = {}
    for number in range(data.draw(st.integers(2, 12))):
        start, stop = sorted(data.draw(st.tuples(st.integers(0, 299), st.integers(0, 299))))
        slot = history.begin(f"t{number}", "gh"[number % 2], 0, base[start:stop])
        live[slot] = base[start:stop].tolist()
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(live)))
            history.end(gone)
            del live[gone]
        for each, context in live.items():
            draft(history, each)
            for cursor in history._slots.cursors[each, : history._slots.state[each, suffixes.CURSORS]]:
                if cursor[suffixes.WRONG] == 0:
                    assert (
                        _text_before(history, cursor[suffixes.AT], cursor[suffixes.LENGTH])
                        == (context[len(context) - cursor[suffixes.LENGTH] :])
                    )
            more = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
            feed(history, each, more)
            context += more
    history.check_integrity()


def _text_before(history: SuffixHistory, position: int, length: int) -> list[int]:
    text = []
    for _ in range(length):
        position = pages.position_before(history._arena, position)
        text.append(int(history._arena.tokens[position]))
    return text[::-1]
