"""The suffix index: which earlier places a request is in the middle of repeating, and what followed there.

Every request keeps up to `MAX_CURSORS` *cursors*: places of the arena whose context
equals the request's. New ones are found through the arena's chains at every draft;
afterwards a cursor just moves along with the sampled tokens, so that a long match is
never lost among the newer occurrences of a frequent context. A cursor whose next
token turns out wrong is followed a little further: texts of agents repeat with a
name, a number or an identifier exchanged, and the copy goes on behind it (the recovery
of the match model in the paq/lpaq compressors).

A draft is a weighted vote. At each position every candidate votes for its next token
with the odds that it is right; the token with most votes is drafted, the candidates
that said something else drop out. That is linear in candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_war.kernel import kernel
from nemo_war.speculative.arena import (
    ANY,
    BIRTH,
    DEPTH,
    EPOCH,
    FILL,
    FREE,
    GROUP,
    KIN,
    NONE,
    OWNER,
    PAGE,
    PRIVATE,
    REFERENCES,
    append,
    bucket_of,
    is_sampled,
    position_after,
    position_before,
)
from nemo_war.speculative.calibration import (
    AGES,
    GIVEN,
    LENGTH_OF,
    MAX_MATCH,
    OTHER,
    OWN,
    RECOVERING,
    SIBLING,
    acceptance,
    cell_of,
    form_after,
    learn,
    record,
    weight_of,
)

MAX_CURSORS = 32
MAX_VISITS = 16  # places looked at per chain and draft; more cost time and, being older, mislead
WINDOW = 2 * MAX_MATCH  # the context is shifted down once in MAX_MATCH tokens
PATIENCE = 3  # wrong tokens in a row that a cursor survives
ESTABLISHED = 8  # matched tokens from which on a cursor is worth following past a wrong one
SURVIVAL_FLOOR = 0.02
LEAST_TOTAL = np.float32(1e-30)  # only not to divide by zero: votes of little trust are 1e-5 in all
CATCH_UP = 64  # tokens of a prompt that are read before a turn's first draft,
STRIDE = 4  # with a search after every so many

# Columns of `Slots.state`.
(
    OWNER_ROW, GROUP_ID, KIN_ID, TRAJECTORY_EPOCH, TAIL, STORED, MODE, CONTEXT, CURSORS, DRAFTED, SHARED,
    FORM,
) = range(12)  # fmt: skip
STATE_COLUMNS = 12
# Values of MODE: an unused slot; tokens are stored, for everybody or for itself; no room was left.
IDLE, PUBLIC, SECLUDED, FULL = range(4)
# Columns of `Slots.cursors`.
AT, SEEN_BIRTH, LENGTH, WRONG = range(4)


class Slots(NamedTuple):
    """State of the turns that run, `S` at most; changed in place.

    Attributes:
        state: int32[S, STATE_COLUMNS].
        context: int32[S, WINDOW]: the last tokens; `state[:, CONTEXT]` of them are there.
        cursors: int32[S, MAX_CURSORS, 4]: position of the token that comes next, BIRTH of its
            page, matched tokens (at most MAX_MATCH), wrong tokens since it was established.
        draft: int32[S, K], cells: int64[S, K], predicted: float32[S, K]: the last draft.
        found: int32[2, MAX_VISITS + 1]: scratch of a search.
    """

    state: np.ndarray
    context: np.ndarray
    cursors: np.ndarray
    draft: np.ndarray
    cells: np.ndarray
    predicted: np.ndarray
    found: np.ndarray


class Ballot(NamedTuple):
    """Scratch of one vote: the candidates that are left, and the tokens they are for."""

    at: np.ndarray
    weight: np.ndarray
    cursor: np.ndarray
    tokens: np.ndarray
    votes: np.ndarray


def new_slots(count: int, max_draft: int) -> Slots:
    """Room for `count` running turns."""
    return Slots(
        state=np.zeros((count, STATE_COLUMNS), np.int32),
        context=np.zeros((count, WINDOW), np.int32),
        cursors=np.zeros((count, MAX_CURSORS, 4), np.int32),
        draft=np.zeros((count, max_draft), np.int32),
        cells=np.zeros((count, max_draft), np.int64),
        predicted=np.zeros((count, max_draft), np.float32),
        found=np.zeros((2, MAX_VISITS + 1), np.int32),
    )


def new_ballot() -> Ballot:
    """Scratch for `draft`."""
    return Ballot(
        at=np.zeros(MAX_CURSORS, np.int32),
        weight=np.zeros(MAX_CURSORS, np.float32),
        cursor=np.zeros(MAX_CURSORS, np.int32),
        tokens=np.zeros(MAX_CURSORS, np.int32),
        votes=np.zeros(MAX_CURSORS, np.float32),
    )


@kernel
def kind_of(arena, state, position):
    """Whose token stands at a position, seen from a slot's state int32[...], and whether it was GIVEN."""
    page = arena.pages[position // PAGE]
    if page[OWNER] == state[OWNER_ROW] or (page[DEPTH] < state[SHARED] and page[REFERENCES] > 1):
        kind = OWN
    else:
        kind = SIBLING if page[GROUP] == state[GROUP_ID] else OTHER
    return kind if is_sampled(arena, position) else kind + GIVEN


@kernel
def age_of(arena, position, epoch):
    """Age class of a position's tokens: 0, 1, 2-3 or more policy epochs."""
    age = epoch - arena.pages[position // PAGE, EPOCH]
    return 0 if age <= 0 else 1 if age == 1 else 2 if age < 4 else AGES - 1


@kernel
def match_length(arena, position, context, count):
    """How many tokens up to and with `position` equal the last of context int32[count]; at most MAX_MATCH."""
    limit = min(count, MAX_MATCH)
    length = 0
    while length < limit and position >= 0 and arena.tokens[position] == context[count - 1 - length]:
        length += 1
        position = position_before(arena, position)
    return length


@kernel
def kind_of_cursor(arena, state, cursor, position):
    """Kind of a cursor int32[4] that stands or, in a draft, would stand at a position."""
    return kind_of(arena, state, position) + (RECOVERING if cursor[WRONG] > 0 else 0)


@kernel
def _is_current(arena, cursor):
    page = arena.pages[cursor[AT] // PAGE]
    return page[BIRTH] == cursor[SEEN_BIRTH] and cursor[AT] % PAGE < page[FILL]


@kernel
def _add_cursor(arena, slots, slot, at, length):
    """Enter a place that was found by a chain, or tell the cursor that is already there its length."""
    state, cursors = slots.state[slot], slots.cursors[slot]
    count = state[CURSORS]
    for index in range(count):
        if cursors[index, AT] == at:
            cursors[index, LENGTH] = max(length, cursors[index, LENGTH])
            return
    index = count
    if count == MAX_CURSORS:
        index = np.argmin(cursors[:, LENGTH])
        if cursors[index, LENGTH] >= length:
            return
    else:
        state[CURSORS] += 1
    cursors[index, AT], cursors[index, SEEN_BIRTH] = at, arena.pages[at // PAGE, BIRTH]
    cursors[index, LENGTH], cursors[index, WRONG] = length, 0


@kernel
def _walk_chains(arena, slots, kin, any_):
    """List in `slots.found` the newest places of both chains; return how many of KIN and of ANY.

    Every place is somewhere else in memory. The two chains are walked in step, and what will
    be looked at is touched without waiting for it, so that the cache misses overlap.
    """
    kins = anys = touched = 0
    for _ in range(MAX_VISITS):
        if kin >= 0:
            slots.found[KIN, kins] = kin
            touched += arena.tokens[kin] + arena.pages[kin // PAGE, FILL]
            kin = arena.links[kin, 2 * KIN]
            kins += 1
        if any_ >= 0:
            slots.found[ANY, anys] = any_
            touched += arena.tokens[any_] + arena.pages[any_ // PAGE, FILL]
            any_ = arena.links[any_, 2 * ANY]
            anys += 1
    slots.found[ANY, MAX_VISITS] = touched & 1  # else the compiler would leave it out
    return kins, anys


@kernel
def _enter_places(arena, slots, slot, chain, count, least):
    """Make cursors of the places found whose context matches in at least `least` tokens."""
    state, context = slots.state[slot], slots.context[slot]
    for index in range(count):
        position = slots.found[chain, index]
        page = arena.pages[position // PAGE]
        if not page[PRIVATE] or page[OWNER] == state[OWNER_ROW]:
            after = position_after(arena, position)
            if after >= 0:
                length = match_length(arena, position, context, state[CONTEXT])
                if length >= least:
                    _add_cursor(arena, slots, slot, after, length)


@kernel
def search(arena, slots, slot):
    """Find places with the slot's context through the chains, and drop cursors whose tokens are gone."""
    state, context, cursors = slots.state[slot], slots.context[slot], slots.cursors[slot]
    kept = 0
    for index in range(state[CURSORS]):
        if _is_current(arena, cursors[index]):
            for column in range(4):
                cursors[kept, column] = cursors[index, column]
            kept += 1
    state[CURSORS] = kept
    count = state[CONTEXT]
    kin = any_ = np.int64(NONE)
    if count >= 1:
        kin = np.int64(arena.heads[KIN, bucket_of(arena, state[KIN_ID], context[count - 1])])
    if count >= 2:
        any_ = np.int64(arena.heads[ANY, bucket_of(arena, context[count - 2], context[count - 1])])
    kins, anys = _walk_chains(arena, slots, kin, any_)
    _enter_places(arena, slots, slot, KIN, kins, 1)
    _enter_places(arena, slots, slot, ANY, anys, 2)


@kernel
def follow(arena, slots, slot, token, trust, sampled):
    """Move the cursors past a token, and if a model sampled it learn from each whether it said so."""
    state, cursors = slots.state[slot], slots.cursors[slot]
    kept = 0
    for index in range(state[CURSORS]):
        cursor = cursors[index]
        if not _is_current(arena, cursor):
            continue
        at = cursor[AT]
        right = arena.tokens[at] == token
        kind = kind_of_cursor(arena, state, cursor, at)
        if sampled:
            record(trust[kind, LENGTH_OF[cursor[LENGTH]], age_of(arena, at, state[TRAJECTORY_EPOCH])], right)
        length, wrong = cursor[LENGTH], cursor[WRONG]
        if right:
            length = min(length + 1, MAX_MATCH)
            wrong = 0 if length >= ESTABLISHED else wrong
        elif wrong < PATIENCE and (wrong > 0 or length >= ESTABLISHED):
            length, wrong = 0, wrong + 1
        else:
            continue
        after = position_after(arena, at)
        if after >= 0:
            cursors[kept, AT], cursors[kept, SEEN_BIRTH] = after, arena.pages[after // PAGE, BIRTH]
            cursors[kept, LENGTH], cursors[kept, WRONG] = length, wrong
            kept += 1
    state[CURSORS] = kept


@kernel
def _push_context(slots, slot, token):
    context, state = slots.context[slot], slots.state[slot]
    if state[CONTEXT] == WINDOW:
        for index in range(MAX_MATCH):
            context[index] = context[WINDOW - MAX_MATCH + index]
        state[CONTEXT] = MAX_MATCH
    context[state[CONTEXT]] = token
    state[CONTEXT] += 1


@kernel
def _judge_draft(slots, slot, tokens, calibration):
    """Compare the last draft with the tokens int32[n] that came."""
    state = slots.state[slot]
    if state[DRAFTED] > 0:
        state[FORM] = form_after(state[FORM], slots.draft[slot, 0] == tokens[0])
    for index in range(min(state[DRAFTED], tokens.shape[0])):
        right = slots.draft[slot, index] == tokens[index]
        learn(calibration, slots.cells[slot, index], slots.predicted[slot, index], right)
        if not right:
            break
    state[DRAFTED] = 0


@kernel
def pages_missing(arena, slots, rows, counts):
    """How many pages more than are free it takes to store counts int32[B] tokens in slots rows int32[B]."""
    needed = 0
    for row in range(rows.shape[0]):
        slot = rows[row]
        if slot >= 0 and (slots.state[slot, MODE] == PUBLIC or slots.state[slot, MODE] == SECLUDED):
            stored = slots.state[slot, STORED]
            needed += (stored + counts[row] + PAGE - 1) // PAGE - (stored + PAGE - 1) // PAGE
    return needed - arena.counters[FREE]


@kernel
def extend(arena, slots, rows, tokens, counts, calibration):
    """Take in the first counts int32[B] of the sampled tokens int32[B, ...] of slots rows int32[B]."""
    for row in range(rows.shape[0]):
        slot = rows[row]
        if slot < 0 or slots.state[slot, MODE] == IDLE or counts[row] <= 0:
            continue
        state, fresh = slots.state[slot], tokens[row, : counts[row]]
        _judge_draft(slots, slot, fresh, calibration)
        if state[MODE] != FULL:
            private = state[MODE] == SECLUDED
            tail, stored = append(
                arena,
                state[TAIL],
                fresh,
                state[OWNER_ROW],
                state[KIN_ID],
                state[TRAJECTORY_EPOCH],
                private,
                True,
            )
            state[TAIL], state[STORED] = tail, state[STORED] + stored
            if stored < fresh.shape[0]:
                state[MODE] = FULL
        for index in range(fresh.shape[0]):
            follow(arena, slots, slot, fresh[index], calibration.trust, True)
            _push_context(slots, slot, fresh[index])


@kernel
def catch_up(arena, slots, slot, tokens, trust):
    """Read the end of a prompt, int32[n], so that the long matches are known when the turn starts."""
    for index in range(tokens.shape[0]):
        follow(arena, slots, slot, tokens[index], trust, False)
        _push_context(slots, slot, tokens[index])
        if index % STRIDE == STRIDE - 1:
            search(arena, slots, slot)


@kernel
def _count_votes(arena, ballot, left):
    """Tally the candidates that are left; return how many tokens were named, and the sum of votes."""
    named, total = 0, np.float32(0)
    for index in range(left):
        token, weight = arena.tokens[ballot.at[index]], ballot.weight[index]
        total += weight
        for other in range(named):
            if ballot.tokens[other] == token:
                ballot.votes[other] += weight
                break
        else:
            ballot.tokens[named], ballot.votes[named] = token, weight
            named += 1
    return named, total


@kernel
def _keep_agreeing(arena, ballot, left, token):
    """Drop the candidates that did not name `token`; the strongest goes to the front. Returns those left."""
    kept = 0
    for index in range(left):
        if arena.tokens[ballot.at[index]] == token:
            ballot.at[kept], ballot.weight[kept] = ballot.at[index], ballot.weight[index]
            ballot.cursor[kept] = ballot.cursor[index]
            if ballot.weight[kept] > ballot.weight[0]:
                _swap_with_first(ballot, kept)
            kept += 1
    return kept


@kernel
def _swap_with_first(ballot, index):
    ballot.at[0], ballot.at[index] = ballot.at[index], ballot.at[0]
    ballot.weight[0], ballot.weight[index] = ballot.weight[index], ballot.weight[0]
    ballot.cursor[0], ballot.cursor[index] = ballot.cursor[index], ballot.cursor[0]


@kernel
def _ends_output(arena, at):
    """Whether what a model sampled ended with this position: no output goes on behind such a token."""
    after = position_after(arena, at)
    return is_sampled(arena, at) and after >= 0 and not is_sampled(arena, after)


@kernel
def _advance_candidates(arena, ballot, left):
    kept = 0
    for index in range(left):
        after = position_after(arena, ballot.at[index])
        if after >= 0:
            ballot.at[kept], ballot.weight[kept] = after, ballot.weight[index]
            ballot.cursor[kept] = ballot.cursor[index]
            kept += 1
    return kept


@kernel
def vote(arena, slots, slot, budget, epoch, calibration, ballot, survival):
    """Draft up to `budget` tokens from the slot's cursors into `slots.draft`; return how many.

    Args:
        survival: float32[K], filled with the probability that the draft is right up to each token.
    """
    state, cursors = slots.state[slot], slots.cursors[slot]
    left = state[CURSORS]
    for index in range(left):
        ballot.at[index], ballot.cursor[index] = cursors[index, AT], index
        kind = kind_of_cursor(arena, state, cursors[index], cursors[index, AT])
        age = age_of(arena, cursors[index, AT], epoch)
        ballot.weight[index] = weight_of(calibration.trust, kind, cursors[index, LENGTH], age)
    alive = np.float32(1)
    for place in range(budget):
        if left == 0:
            return place
        named, total = _count_votes(arena, ballot, left)
        best = np.argmax(ballot.votes[:named])
        agreement = ballot.votes[best] / max(total, LEAST_TOTAL)
        token = ballot.tokens[best]
        left = _keep_agreeing(arena, ballot, left, token)
        leader, at = cursors[ballot.cursor[0]], ballot.at[0]
        kind = kind_of_cursor(arena, state, leader, at)
        cell = cell_of(kind, leader[LENGTH] + place, agreement, left, place, state[FORM])
        predicted = acceptance(calibration, cell)
        alive *= predicted
        if alive < SURVIVAL_FLOOR:
            return place
        slots.draft[slot, place], slots.cells[slot, place] = token, cell
        slots.predicted[slot, place], survival[place] = predicted, alive
        if _ends_output(arena, at):
            return place + 1
        left = _advance_candidates(arena, ballot, left)
    return budget


@kernel
def draft(arena, slots, rows, budgets, epoch, calibration, ballot, tokens, lengths, survival):
    """Draft for slots rows int32[B] into tokens int32[B, K], lengths int32[B], survival float32[B, K]."""
    for row in range(rows.shape[0]):
        slot, length = rows[row], 0
        if slot >= 0 and slots.state[slot, MODE] != IDLE:
            budget = min(budgets[row], tokens.shape[1])
            if budget > 0:
                search(arena, slots, slot)
                length = vote(arena, slots, slot, budget, epoch, calibration, ballot, survival[row])
            slots.state[slot, DRAFTED] = length
            for place in range(length):
                tokens[row, place] = slots.draft[slot, place]
        lengths[row] = length
        for place in range(length, tokens.shape[1]):
            tokens[row, place] = 0
            survival[row, place] = 0
