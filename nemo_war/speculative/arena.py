"""Where tokens live: a trie of fixed pages, and chains through the places a short context occurred.

A trajectory is a path of pages from the root. Full pages of equal content under the
same parent are one page, so that a system prompt, or the prompt that the siblings of
a group share, is stored and indexed once however many trajectories start with it.

A *position* is `page * PAGE + offset`. Every position is linked into two chains,
newest first, through the positions before which the same tokens stood:

* `ANY`: the last two tokens are equal (in any trajectory);
* `KIN`: the last token and the group are equal.

Contexts of three and two tokens make shorter chains but find less: on recorded agents they
cost 1 to 8 % of goodput, most where drafts are cheap.

Chains over hashed short contexts are the match finder of LZ77 compressors (zlib's
`deflate`); theirs are linked one way since a sliding window forgets in order. Ours
are linked both ways: trajectories leave in any order, and a position that leaves is
taken out exactly, so no chain ever runs into a page that was reused.

Memory per token: 4 bytes token, 16 links, at most 4 chain heads, 1 page record.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_war.kernel import kernel

PAGE = 64
NONE = -1

# Columns of `Arena.pages`; padded to 16 so that a page's record is one cache line.
PARENT, CHILD, NEWER, OLDER, REFERENCES, FILL, DEPTH, OWNER, GROUP, EPOCH, BIRTH, PRIVATE = range(12)
SAMPLED = 12  # and 13: one bit for each token of the page
PAGE_COLUMNS = 16
# Chains, and with them the pairs of columns (older, newer) of `Arena.links`.
ANY, KIN = 0, 1
# Entries of `Arena.counters`.
FREE, BIRTHS, ROOTS = range(3)
# How many first pages are compared when a new trajectory looks for one that it can share.
MAX_SIBLINGS = 512


class Arena(NamedTuple):
    """Arrays of one token store of `P` pages; all of them are changed in place by the kernels.

    Attributes:
        tokens: int32[P * PAGE], by position.
        links: int32[P * PAGE, 4]: older and newer neighbour in the chains ANY and KIN.
            The newest has `-2 - bucket` for a newer neighbour, a position outside of
            the chain has NONE for both.
        heads: int32[2, H]: newest position of each bucket, NONE if empty; H is a power of two.
        pages: int32[P, PAGE_COLUMNS]. REFERENCES counts child pages and the trajectories
            whose last page it is. CHILD, NEWER and OLDER list the children of a page, the
            newest first. OWNER and GROUP are those of the latest trajectory through the
            page; GROUP is also the key of the chain KIN. BIRTH changes whenever tokens
            of the page are taken away. The bits from SAMPLED on tell tokens that a model
            sampled from those it was given.
        free: int32[P]: a stack of pages; the first `counters[FREE]` entries are free.
        counters: int64[3].
    """

    tokens: np.ndarray
    links: np.ndarray
    heads: np.ndarray
    pages: np.ndarray
    free: np.ndarray
    counters: np.ndarray


def new_arena(max_tokens: int) -> Arena:
    """An empty arena for `max_tokens` tokens, rounded up to pages; all memory is taken now."""
    count = max(1, -(-max_tokens // PAGE))
    buckets = 1 << max(6, (count * PAGE // 2 - 1).bit_length())
    pages = np.zeros((count, PAGE_COLUMNS), np.int32)
    counters = np.array([count, 0, NONE], np.int64)
    return Arena(
        tokens=np.zeros(count * PAGE, np.int32),
        links=np.full((count * PAGE, 4), NONE, np.int32),
        heads=np.full((2, buckets), NONE, np.int32),
        pages=pages,
        free=np.arange(count - 1, -1, -1, dtype=np.int32),
        counters=counters,
    )


@kernel
def position_before(arena, position):
    """The position one token earlier on the way to the root, or NONE."""
    if position % PAGE:
        return position - 1
    parent = arena.pages[position // PAGE, PARENT]
    return parent * PAGE + PAGE - 1 if parent >= 0 else NONE


@kernel
def position_after(arena, position):
    """The next position, through the newest child where pages branch; NONE at the end."""
    page = position // PAGE
    if position % PAGE < PAGE - 1:
        return position + 1 if position % PAGE + 1 < arena.pages[page, FILL] else NONE
    child = arena.pages[page, CHILD]
    return child * PAGE if child >= 0 else NONE


@kernel
def bucket_of(arena, scope, last):
    """The chain of a context; `scope` is the token before the last (ANY) or the group (KIN)."""
    mixed = np.uint64(np.uint32(scope)) * np.uint64(0x9E3779B97F4A7C15)  # mixing as in splitmix64
    mixed = (mixed ^ (mixed >> np.uint64(32)) ^ np.uint64(np.uint32(last))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return np.int64(mixed & np.uint64(arena.heads.shape[1] - 1))


@kernel
def _link(arena, chain, bucket, position):
    head = arena.heads[chain, bucket]
    arena.links[position, 2 * chain] = head
    arena.links[position, 2 * chain + 1] = -2 - bucket
    if head >= 0:
        arena.links[head, 2 * chain + 1] = position
    arena.heads[chain, bucket] = position


@kernel
def _unlink(arena, chain, position):
    older = arena.links[position, 2 * chain]
    newer = arena.links[position, 2 * chain + 1]
    if newer >= 0:
        arena.links[newer, 2 * chain] = older
    elif newer < NONE:
        arena.heads[chain, -2 - newer] = older
    if older >= 0:
        arena.links[older, 2 * chain + 1] = newer
    arena.links[position, 2 * chain] = NONE
    arena.links[position, 2 * chain + 1] = NONE


@kernel
def _is_listed(arena, page):
    """Whether a page stands in its parent's list: public pages must not lead into private ones."""
    parent = arena.pages[page, PARENT]
    return not arena.pages[page, PRIVATE] or (parent >= 0 and arena.pages[parent, PRIVATE] != 0)


@kernel
def _list_page(arena, page):
    parent = arena.pages[page, PARENT]
    older = arena.pages[parent, CHILD] if parent >= 0 else arena.counters[ROOTS]
    arena.pages[page, OLDER] = older
    if older >= 0:
        arena.pages[older, NEWER] = page
    if parent >= 0:
        arena.pages[parent, CHILD] = page
    else:
        arena.counters[ROOTS] = page


@kernel
def _unlist_page(arena, page):
    pages = arena.pages
    parent, newer, older = pages[page, PARENT], pages[page, NEWER], pages[page, OLDER]
    if newer >= 0:
        pages[newer, OLDER] = older
    elif parent >= 0:
        pages[parent, CHILD] = older
    else:
        arena.counters[ROOTS] = older
    if older >= 0:
        pages[older, NEWER] = newer


@kernel
def _take_page(arena, parent, owner, group, epoch, private):
    """A free page becomes the last page of the trajectory that ended with `parent`.

    The trajectory's reference to the parent becomes the page's, so the parent's count stays.
    """
    arena.counters[FREE] -= 1
    arena.counters[BIRTHS] += 1
    page = arena.free[arena.counters[FREE]]
    record = arena.pages[page]
    record[PARENT], record[CHILD], record[NEWER], record[OLDER] = parent, NONE, NONE, NONE
    record[REFERENCES], record[FILL] = 1, 0
    record[DEPTH] = arena.pages[parent, DEPTH] + 1 if parent >= 0 else 0
    record[OWNER], record[GROUP], record[EPOCH], record[PRIVATE] = owner, group, epoch, private
    record[BIRTH] = arena.counters[BIRTHS]
    if _is_listed(arena, page):
        _list_page(arena, page)
    return page


@kernel
def _forget_from(arena, page, fill):
    """Take the tokens of a page from offset `fill` on out of the chains."""
    for position in range(page * PAGE + fill, page * PAGE + arena.pages[page, FILL]):
        _unlink(arena, ANY, position)
        _unlink(arena, KIN, position)
    arena.counters[BIRTHS] += 1
    arena.pages[page, BIRTH] = arena.counters[BIRTHS]
    arena.pages[page, FILL] = fill


@kernel
def release(arena, page):
    """A trajectory lets go of its last page; pages that nothing refers to any more become free."""
    if page >= 0:
        arena.pages[page, REFERENCES] -= 1
    while page >= 0 and arena.pages[page, REFERENCES] == 0:
        parent = arena.pages[page, PARENT]
        _forget_from(arena, page, 0)
        if _is_listed(arena, page):
            _unlist_page(arena, page)
        arena.free[arena.counters[FREE]] = page
        arena.counters[FREE] += 1
        if parent >= 0:
            arena.pages[parent, REFERENCES] -= 1
        page = parent


@kernel
def is_sampled(arena, position):
    """1 if the token at a position was sampled by a model, 0 if it was given."""
    offset = position % PAGE
    return (arena.pages[position // PAGE, SAMPLED + offset // 32] >> (offset % 32)) & 1


@kernel
def _set_sampled(arena, position, sampled):
    offset = position % PAGE
    column, bit = SAMPLED + offset // 32, np.int32(1) << (offset % 32)
    if sampled:
        arena.pages[position // PAGE, column] |= bit
    else:
        arena.pages[position // PAGE, column] &= ~bit


@kernel
def append(arena, tail, tokens, owner, group, epoch, private, sampled):
    """Append tokens int32[n] to the trajectory whose last page is `tail` (NONE: no token yet).

    Args:
        arena: the arena.
        tail: last page of the trajectory.
        tokens: what to append.
        owner, group, epoch, private: signature of the pages that are taken for them.
        sampled: whether a model sampled them.

    Returns:
        The new last page, and how many tokens were stored: fewer than n when no page was free.
    """
    last = arena.tokens[tail * PAGE + arena.pages[tail, FILL] - 1] if tail >= 0 else NONE
    for index in range(tokens.shape[0]):
        if tail < 0 or arena.pages[tail, FILL] == PAGE:
            if arena.counters[FREE] == 0:
                return tail, index
            tail = _take_page(arena, tail, owner, group, epoch, private)
        token = tokens[index]
        position = tail * PAGE + arena.pages[tail, FILL]
        arena.tokens[position] = token
        _set_sampled(arena, position, sampled)
        arena.pages[tail, FILL] += 1
        _link(arena, KIN, bucket_of(arena, group, token), position)
        if last >= 0 and not private:
            _link(arena, ANY, bucket_of(arena, last, token), position)
        last = token
    return tail, tokens.shape[0]


@kernel
def common_prefix(arena, tail, tokens):
    """How many leading tokens of int32[n] are those of the trajectory that ends with page `tail`."""
    common = 0
    if tail >= 0:
        common = min(arena.pages[tail, DEPTH] * PAGE + arena.pages[tail, FILL], tokens.shape[0])
    page = tail
    while page >= 0:
        first = arena.pages[page, DEPTH] * PAGE
        for index in range(min(common - first, PAGE)):
            if arena.tokens[page * PAGE + index] != tokens[first + index]:
                common = first + index
                break
        page = arena.pages[page, PARENT]
    return common


@kernel
def cut(arena, tail, keep, owner, group, epoch, private):
    """Keep the first `keep` tokens of the trajectory that ends with page `tail`.

    A page that others use is not cut but copied as far as it is kept.

    Returns:
        The new last page, and the tokens that are left: fewer than `keep` only if such a
        copy found no free page.
    """
    while tail >= 0 and arena.pages[tail, DEPTH] * PAGE >= keep:
        parent = arena.pages[tail, PARENT]
        if parent >= 0:
            arena.pages[parent, REFERENCES] += 1
        release(arena, tail)
        tail = parent
    if tail < 0:
        return tail, 0
    first = arena.pages[tail, DEPTH] * PAGE
    fill = keep - first
    if fill < arena.pages[tail, FILL]:
        if arena.pages[tail, REFERENCES] == 1:
            _forget_from(arena, tail, fill)
        else:
            shared, tail = tail, arena.pages[tail, PARENT]
            if tail >= 0:
                arena.pages[tail, REFERENCES] += 1
            copied = arena.tokens[shared * PAGE : shared * PAGE + fill]
            release(arena, shared)
            bits = arena.pages[shared, SAMPLED : SAMPLED + 2]
            tail, fill = append(arena, tail, copied, owner, group, epoch, private, False)
            if fill:
                arena.pages[tail, SAMPLED] = bits[0]
                arena.pages[tail, SAMPLED + 1] = bits[1]
    else:
        fill = arena.pages[tail, FILL]
    return tail, first + fill


@kernel
def share(arena, tokens, owner, group, epoch, private):
    """Start a trajectory on the stored pages that equal the beginning of tokens int32[n].

    Public trajectories sign the pages they share with their own name, group and epoch,
    since the latest use says best how much a page's tokens are worth.

    Returns:
        The last page of the new trajectory (NONE: nothing to share). Its tokens are all full pages.
    """
    tail = NONE
    for first in range(0, tokens.shape[0] - PAGE + 1, PAGE):
        child = arena.pages[tail, CHILD] if tail >= 0 else arena.counters[ROOTS]
        found = NONE
        for _ in range(MAX_SIBLINGS):
            if child < 0:
                break
            if arena.pages[child, FILL] == PAGE and not arena.pages[child, PRIVATE]:
                index = 0
                while index < PAGE and arena.tokens[child * PAGE + index] == tokens[first + index]:
                    index += 1
                if index == PAGE:
                    found = child
                    break
            child = arena.pages[child, OLDER]
        if found < 0:
            break
        tail = np.int64(found)
        if not private:
            arena.pages[tail, OWNER], arena.pages[tail, GROUP] = owner, group
            arena.pages[tail, EPOCH] = epoch
    if tail >= 0:
        arena.pages[tail, REFERENCES] += 1
    return tail


@kernel
def shared_depth(arena, tail):
    """How many leading pages of the trajectory that ends with page `tail` others use as well."""
    while tail >= 0 and arena.pages[tail, REFERENCES] == 1:
        tail = arena.pages[tail, PARENT]
    return arena.pages[tail, DEPTH] + 1 if tail >= 0 else 0


@kernel
def read_last(arena, tail, out):
    """Fill `out` int32[n] from the right with the last tokens of a trajectory; return how many."""
    position = tail * PAGE + arena.pages[tail, FILL] - 1 if tail >= 0 else NONE
    count = 0
    while position >= 0 and count < out.shape[0]:
        count += 1
        out[out.shape[0] - count] = arena.tokens[position]
        position = position_before(arena, position)
    return count


@kernel
def read_sampled(arena, tail, out):
    """Fill `out` bool[n], n tokens of a trajectory from the last back, with whether they were sampled."""
    position = tail * PAGE + arena.pages[tail, FILL] - 1 if tail >= 0 else NONE
    for index in range(out.shape[0] - 1, -1, -1):
        out[index] = is_sampled(arena, position) != 0
        position = position_before(arena, position)


@kernel
def mark_sampled(arena, tail, sampled):
    """Set for all tokens of a trajectory, bool[n], whether they were sampled."""
    position = tail * PAGE + arena.pages[tail, FILL] - 1 if tail >= 0 else NONE
    for index in range(sampled.shape[0] - 1, -1, -1):
        _set_sampled(arena, position, sampled[index])
        position = position_before(arena, position)


def check_arena(arena: Arena, tails: np.ndarray) -> None:
    """Raise AssertionError, with the reason, unless the arena is what its docstring says.

    Args:
        arena: the arena.
        tails: int[n], the last page of every trajectory that is stored (none empty).
    """
    count = len(arena.pages)
    free = arena.free[: arena.counters[FREE]]
    used = np.ones(count, bool)
    used[free] = False
    _require(used.sum() == count - len(free), "a page is free twice")
    pages = arena.pages[used]
    parents = pages[:, PARENT]
    references = np.bincount(parents[parents >= 0], minlength=count) + np.bincount(tails, minlength=count)
    _require(bool((references[used] == pages[:, REFERENCES]).all()), "a page's references do not add up")
    _require(bool((references[~used] == 0).all()), "a free page is referred to")
    _require(bool(((pages[:, FILL] > 0) & (pages[:, FILL] <= PAGE)).all()), "a page is empty or overfull")
    inner = arena.pages[parents[parents >= 0]]
    _require(bool((inner[:, FILL] == PAGE).all()), "a page with children is not full")
    _require(bool((inner[:, DEPTH] + 1 == pages[parents >= 0, DEPTH]).all()), "a page's depth is wrong")
    for page in np.flatnonzero(used):
        child = int(arena.pages[page, CHILD])
        _require(child < 0 or arena.pages[child, PARENT] == page, "a page's newest child is not its child")
    filled = np.arange(PAGE)[None, :] < np.where(used, arena.pages[:, FILL], 0)[:, None]
    for chain in (ANY, KIN):
        _check_chain(arena, chain, filled.reshape(-1))


def _check_chain(arena: Arena, chain: int, filled: np.ndarray) -> None:
    older, newer = arena.links[:, 2 * chain], arena.links[:, 2 * chain + 1]
    linked = newer != NONE
    _require(not (linked & ~filled).any(), "a chain runs through a place that holds no token")
    places = np.flatnonzero(linked)
    heads = arena.heads[chain]
    first = newer[places] < NONE
    _require(
        bool((heads[-2 - newer[places[first]]] == places[first]).all()),
        "a chain's newest place is not its head",
    )
    _require(int((heads >= 0).sum()) == int(first.sum()), "a chain's head is not linked")
    _require(
        bool((older[newer[places[~first]]] == places[~first]).all()), "a chain is broken towards the newer"
    )
    later = older[places] >= 0
    _require(
        bool((newer[older[places[later]]] == places[later]).all()), "a chain is broken towards the older"
    )


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise AssertionError(f"suffix history: {reason}")
