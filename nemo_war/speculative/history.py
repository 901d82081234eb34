"""What a replica remembers of its trajectories, as a source of drafts.

History is apart from drafting with a model: it is token sequences with a name, a group
and the policy epoch they were sampled under. It outlives refits, since weights change
much faster than what agents write. `SuffixHistory` keeps it within a budget and drafts
from it; `archive` moves it between replicas and to disk.

One thread at a time may use an object. The calls that work on a batch release the GIL.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nemo_war.speculative import arena as pages
from nemo_war.speculative import calibration as calibrations
from nemo_war.speculative import index as suffixes
from nemo_war.speculative.archive import (
    Sequence,
    Sequences,
    as_restored,
    read_archive,
    read_archives,
    write_archive,
)
from nemo_war.speculative.retention import Retention, Trajectory


class Drafts(NamedTuple):
    """Drafts of a batch; views that the next `draft` call overwrites.

    Attributes:
        tokens: int32[B, max_draft], zero behind the draft.
        lengths: int32[B].
        survival: float32[B, max_draft]: probability that the token and all before it are
            accepted; it never rises along a draft and is zero behind it.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    survival: np.ndarray


@dataclass(frozen=True, slots=True)
class HistoryStats:
    """Size of a history. `tokens` counts what is stored: pages that trajectories share count once."""

    tokens: int
    trajectories: int
    epochs: int
    bytes: int
    evictions: int


class SuffixHistory:
    """Bounded store of trajectories and the drafts that come from it.

    A trajectory is *live* between `begin` and `end`; live ones are never evicted. When they
    alone exceed the budget their newer tokens are not stored, and drafted for all the same.
    """

    def __init__(
        self,
        max_tokens: int,
        max_draft: int,
        max_epochs: int | None = None,
        max_live: int = 1024,
        max_group_tokens: int | None = None,
    ) -> None:
        """Take all memory now.

        Args:
            max_tokens: tokens kept, rounded up to pages of 64.
            max_draft: longest draft.
            max_epochs: forget trajectories that no turn of the last so many epochs continued.
            max_live: turns that can run at once; for those beyond there are no drafts.
            max_group_tokens: tokens that the ended trajectories of one group may hold together.
        """
        self.max_draft, self.max_epochs, self.max_live = max_draft, max_epochs, max_live
        self._max_tokens, self._max_group_tokens = max_tokens, max_group_tokens
        self._tokens = np.zeros((max_live, max_draft), np.int32)
        self._lengths = np.zeros(max_live, np.int32)
        self._survival = np.zeros((max_live, max_draft), np.float32)
        self._ballot = suffixes.new_ballot()
        self._recent = np.zeros(suffixes.WINDOW, np.int32)
        self.calibration = calibrations.new_calibration()
        self._evictions = 0
        self._rows = 0
        self.clear()

    def clear(self) -> None:
        """Forget all trajectories; slots that are live become void. What was calibrated stays."""
        self._arena = pages.new_arena(self._max_tokens)
        self._slots = suffixes.new_slots(self.max_live, self.max_draft)
        self._free_slots = list(range(self.max_live - 1, -1, -1))
        self._retention = Retention(self._max_group_tokens)
        self._in_slot: dict[int, Trajectory] = {}

    def begin(self, trajectory: str, group: str, epoch: int, tokens: np.ndarray, learn: bool = True) -> int:
        """A turn starts, or comes back after a preemption.

        Only what is new of `tokens` is stored. Where the stored tokens of the trajectory
        differ (drafted tokens behind a stop string, text that was tokenised anew) they are cut first.

        Args:
            trajectory: name of the rollout.
            group: name of its group.
            epoch: policy epoch.
            tokens: int32[n], the whole context so far.
            learn: False: its tokens are drafted from by itself only, and forgotten with the turn.

        Returns:
            A slot for the other calls, or -1 (which they all ignore) if `max_live` turns run.
        """
        return self._begin(trajectory, group, epoch, tokens, learn, shareable=len(tokens))

    def _begin(
        self, trajectory: str, group: str, epoch: int, tokens: np.ndarray, learn: bool, shareable: int
    ) -> int:
        """As `begin`; a new trajectory shares pages of others within its first `shareable` tokens only."""
        tokens = np.array(tokens, np.int32)  # a copy, since kernels are not compiled for read-only arrays
        known = self._retention.get(trajectory)
        is_new = known is None
        if known is None:
            known = self._new_trajectory(trajectory, group, epoch, learn)
        if known.slot == pages.NONE and not self._enter(known, is_new=is_new):
            return pages.NONE
        known.epoch = max(epoch, known.epoch)
        shared = self._store(known, tokens, shareable)
        self._reset_slot(known, tokens, shared, complete=known.stored == len(tokens))
        return known.slot

    def extend(self, slots: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Take in newly sampled tokens; what they say about the last drafts is learned here.

        Args:
            slots: int32[B], entries below zero are skipped.
            tokens: int32[B, n], rows padded.
            counts: int32[B], tokens that are valid in each row.
        """
        missing = suffixes.pages_missing(self._arena, self._slots, slots, counts)
        if missing > 0:
            self._make_room(missing)
        suffixes.extend(self._arena, self._slots, slots, tokens, counts, self.calibration)

    def draft(self, slots: np.ndarray, budgets: np.ndarray, epoch: int) -> Drafts:
        """Draft for a batch, at most `max_live` rows, in one compiled call.

        Args:
            slots: int32[B], entries below zero get no draft.
            budgets: int32[B], longest draft of each row.
            epoch: policy epoch that samples now; older tokens weigh what their age was worth so far.

        Returns:
            Views that are valid until the next call of this method.
        """
        rows = len(slots)
        result = Drafts(self._tokens[:rows], self._lengths[:rows], self._survival[:rows])
        suffixes.draft(
            self._arena, self._slots, slots, budgets, epoch, self.calibration, self._ballot,
            result.tokens, result.lengths, result.survival,
        )  # fmt: skip
        return result

    def end(self, slot: int) -> None:
        """The turn of a slot is over or was aborted; a void slot is ignored."""
        known = self._in_slot.pop(slot, None)
        if known is None:
            return
        self._read_slot(known)
        known.slot = pages.NONE
        self._slots.state[slot, suffixes.MODE] = suffixes.IDLE
        self._free_slots.append(slot)
        self._retire(known)

    def cut(self, trajectory: str, length: int) -> None:
        """Keep the first `length` tokens: the host learned where the output really ended.

        A live turn goes on from there. A name that is not known is ignored.
        """
        known = self._retention.get(trajectory)
        if known is None:
            return
        if known.slot != pages.NONE:
            self._cut_live(known, length)
        elif length < known.stored:
            self._retention.revive(known)  # or the room that a cut may need could be made of it
            self._cut_back(known, length)
            self._retire(known)

    def _cut_live(self, known: Trajectory, length: int) -> None:
        self._read_slot(known)
        if length < known.stored:
            self._cut_back(known, length)
            count = pages.read_last(self._arena, known.tail, self._recent)
            recent = self._recent[len(self._recent) - count :]
            shared = int(pages.shared_depth(self._arena, known.tail))
            self._reset_slot(known, recent, shared, complete=True)

    def _retire(self, known: Trajectory) -> None:
        """No turn of it runs any more: keep it for others, or forget it."""
        if not (known.learn and known.stored):
            self._remove(known)
            return
        for surplus in self._retention.retire(known):
            self._evict(surplus)

    def advance_epoch(self, epoch: int) -> None:
        """The policy changed: apply `max_epochs`, and let new outcomes outweigh what was calibrated."""
        calibrations.soften(self.calibration)
        if self.max_epochs is None:
            return
        for known in [each for each in self._retention.ended() if each.epoch < epoch - self.max_epochs]:
            self._evict(known)

    def stats(self) -> HistoryStats:
        """Current size."""
        free = self._arena.free[: self._arena.counters[pages.FREE]]
        arrays = (*self._arena, *self._slots, *self.calibration)
        return HistoryStats(
            tokens=int(self._arena.pages[:, pages.FILL].sum() - self._arena.pages[free, pages.FILL].sum()),
            trajectories=len(self._retention),
            epochs=len({each.epoch for each in self._retention.all()}),
            bytes=sum(array.nbytes for array in arrays),
            evictions=self._evictions,
        )

    def reliability(self) -> list[tuple[float, float, int]]:
        """(mean prediction, observed rate, draft tokens) by decile of the predicted acceptance."""
        return calibrations.reliability(self.calibration)

    def export_sequences(self, names: Container[str] | None = None) -> Sequences:
        """Copies of what others may learn from, oldest use first; live trajectories as far as they are.

        Args:
            names: only these; None: all.
        """
        chosen = [each for each in self._by_age() if each.learn and (names is None or each.name in names)]
        return Sequences.join(
            [Sequence(each.name, each.group, each.epoch, *self._text(each)) for each in chosen]
        )

    def import_sequences(self, sequences: Sequences) -> int:
        """Learn trajectories of another history.

        Those that are live here, known as far already, or too long to be kept are left out. Where
        the text known here differs, what was imported takes its place, though it be shorter: drafts
        behind a stop string are what histories differ by, and others get final text only.

        As there, what a model sampled is stored for each trajectory that said it: how many did is
        what a vote counts, and what its calibration has learned from.

        Returns:
            How many were taken in.
        """
        taken = 0
        for each in sequences.rows():
            tokens = np.array(each.tokens, np.int32)  # a copy, see `begin`
            known = self._known_part(each.trajectory, tokens)
            if known == len(tokens):
                continue
            given = int(np.argmax(each.sampled)) if each.sampled.any() else len(tokens)
            slot = self._begin(each.trajectory, each.group, each.epoch, tokens, True, shareable=given)
            if slot != pages.NONE:
                tail, stored = self._end_of(self._in_slot[slot])
                pages.mark_sampled(self._arena, tail, np.array(each.sampled[:stored], bool))
                self.end(slot)
                taken += stored > known
        return taken

    def _known_part(self, trajectory: str, tokens: np.ndarray) -> int:
        """How many leading tokens of an import are known; all of them where it has to be left out."""
        known = self._retention.get(trajectory)
        too_long = len(tokens) > len(self._arena.tokens)  # would push all else out, and be a part only
        if too_long or (known is not None and known.slot != pages.NONE):
            return len(tokens)
        return 0 if known is None else int(pages.common_prefix(self._arena, known.tail, tokens))

    def save(self, path: str) -> None:
        """Write all sequences to a file of mode 0600 that is complete or not there."""
        write_archive(path, self.export_sequences())

    def load(self, path: str, vocabulary: int, epoch: int = 0) -> int:
        """Take in the sequences of a file, or of those in a folder, as an earlier run's.

        Args:
            path: see `archive.find_archives`.
            vocabulary: token ids of the model that drafts; a draft beyond it would break the engine.
            epoch: policy epoch now; what was newest then is as old as what is sampled now.

        Returns:
            How many were taken in.

        Raises:
            UserError: there is no such file, one is damaged or something else, or its tokens are
                another model's. Nothing was taken in then.
        """
        sequences = read_archives(Path(path))
        sequences.check_vocabulary(vocabulary, path)
        return self.import_sequences(as_restored(sequences, epoch))

    def restore(self, path: str, vocabulary: int) -> int:
        """Take in the sequences of a file as this run's own: names and epochs stay as they are.

        Args:
            path: a file that `save` wrote.
            vocabulary: see `load`.

        Returns:
            How many were taken in.

        Raises:
            UserError: see `load`. Nothing was taken in then.
        """
        sequences = read_archive(path)
        sequences.check_vocabulary(vocabulary, path)
        return self.import_sequences(sequences)

    def check_integrity(self) -> None:
        """Raise AssertionError, with the reason, if the structures contradict each other."""
        known = list(self._retention.all())
        ends = [self._end_of(each) for each in known]
        tails = np.array([tail for tail, _ in ends if tail != pages.NONE], np.int64)
        pages.check_arena(self._arena, tails)
        for each, (tail, stored) in zip(known, ends, strict=True):
            record = self._arena.pages[tail]
            length = (
                0 if tail == pages.NONE else int(record[pages.DEPTH]) * pages.PAGE + int(record[pages.FILL])
            )
            if length != stored:
                raise AssertionError(
                    f"suffix history: {each.name} should have {stored} tokens, its pages {length}"
                )
        self._retention.check_integrity()

    def _new_trajectory(self, name: str, group: str, epoch: int, learn: bool) -> Trajectory:
        self._rows += 2
        number = self._retention.group_number(group, fresh=self._rows)
        kin = number if learn else self._rows + 1
        known = Trajectory(name, group, epoch, learn, row=self._rows, group_id=number, kin_id=kin)
        self._retention.add(known)
        return known

    def _enter(self, known: Trajectory, *, is_new: bool) -> bool:
        """Give a trajectory a slot; False, and a new one is gone again, if there is none."""
        if not self._free_slots:
            if is_new:
                self._remove(known)
            return False
        self._retention.revive(known)
        known.slot = self._free_slots.pop()
        self._in_slot[known.slot] = known
        state = self._slots.state[known.slot]
        state[suffixes.TAIL], state[suffixes.STORED] = known.tail, known.stored
        state[suffixes.FORM] = known.form
        return True

    def _read_slot(self, known: Trajectory) -> None:
        """Bring a live trajectory up to what its slot, which kernels write, says of it."""
        state = self._slots.state[known.slot]
        known.tail, known.stored = int(state[suffixes.TAIL]), int(state[suffixes.STORED])
        known.form = int(state[suffixes.FORM])

    def _store(self, known: Trajectory, tokens: np.ndarray, shareable: int) -> int:
        """Make the stored tokens of a live trajectory equal `tokens` as far as there is room."""
        self._read_slot(known)
        if known.stored == 0:
            known.tail = int(
                pages.share(
                    self._arena, tokens[:shareable], known.row, known.kin_id, known.epoch, not known.learn
                )
            )
            known.stored = (
                0 if known.tail < 0 else (int(self._arena.pages[known.tail, pages.DEPTH]) + 1) * pages.PAGE
            )
            shared = known.stored // pages.PAGE
        else:
            common = int(pages.common_prefix(self._arena, known.tail, tokens))
            if common < known.stored:
                self._cut_back(known, common)
            shared = int(pages.shared_depth(self._arena, known.tail))
        fresh = tokens[known.stored :]
        self._make_room(-(-len(tokens) // pages.PAGE) - -(-known.stored // pages.PAGE) - self._free_pages())
        known.tail, written = pages.append(
            self._arena, known.tail, fresh, known.row, known.kin_id, known.epoch, not known.learn, False
        )
        known.stored += int(written)
        return shared

    def _reset_slot(self, known: Trajectory, tokens: np.ndarray, shared: int, complete: bool) -> None:
        """Start the slot of a trajectory anew behind `tokens`: no cursors, no draft.

        Args:
            known: a live trajectory.
            tokens: int32[n], its last tokens.
            shared: leading pages that it shares.
            complete: whether all of its tokens are stored, so that more can follow.
        """
        state = self._slots.state[known.slot]
        start = max(0, len(tokens) - suffixes.CATCH_UP)
        recent = tokens[max(0, start - suffixes.MAX_MATCH) : start]
        self._slots.context[known.slot, : len(recent)] = recent
        mode = suffixes.PUBLIC if known.learn else suffixes.SECLUDED
        state[suffixes.MODE] = mode if complete else suffixes.FULL
        state[suffixes.OWNER_ROW], state[suffixes.GROUP_ID], state[suffixes.KIN_ID] = (
            known.row, known.group_id, known.kin_id,
        )  # fmt: skip
        state[suffixes.TRAJECTORY_EPOCH] = known.epoch
        state[suffixes.TAIL], state[suffixes.STORED] = known.tail, known.stored
        state[suffixes.CONTEXT], state[suffixes.CURSORS], state[suffixes.DRAFTED] = len(recent), 0, 0
        state[suffixes.SHARED], state[suffixes.FORM] = shared, known.form
        suffixes.catch_up(self._arena, self._slots, known.slot, tokens[start:], self.calibration.trust)

    def _cut_back(self, known: Trajectory, keep: int) -> None:
        """Only for a trajectory that cannot be evicted meanwhile: a cut may need room."""
        self._make_room(1 - self._free_pages())
        known.tail, known.stored = map(
            int,
            pages.cut(self._arena, known.tail, keep, known.row, known.kin_id, known.epoch, not known.learn),
        )

    def _end_of(self, known: Trajectory) -> tuple[int, int]:
        """Last page and number of stored tokens."""
        if known.slot == pages.NONE:
            return known.tail, known.stored
        state = self._slots.state[known.slot]
        return int(state[suffixes.TAIL]), int(state[suffixes.STORED])

    def _text(self, known: Trajectory) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32[n] of a trajectory, and bool[n] whether they were sampled."""
        tail, stored = self._end_of(known)
        tokens, sampled = np.zeros(stored, np.int32), np.zeros(stored, bool)
        pages.read_last(self._arena, tail, tokens)
        pages.read_sampled(self._arena, tail, sampled)
        return tokens, sampled

    def _by_age(self) -> list[Trajectory]:
        return [*self._retention.ended(), *self._in_slot.values()]

    def _free_pages(self) -> int:
        return int(self._arena.counters[pages.FREE])

    def _make_room(self, missing: int) -> None:
        """Evict the trajectories that ended longest ago until so many more pages are free."""
        target = self._free_pages() + missing
        while self._free_pages() < target and (oldest := self._retention.oldest()) is not None:
            self._evict(oldest)

    def _evict(self, known: Trajectory) -> None:
        self._evictions += 1
        self._remove(known)

    def _remove(self, known: Trajectory) -> None:
        pages.release(self._arena, known.tail)
        self._retention.remove(known)


def warm_up() -> None:
    """Compile every kernel for the types it is called with, or read it from the cache on disk."""
    history = SuffixHistory(max_tokens=1024, max_draft=4, max_live=2)
    text = np.arange(200, dtype=np.int32) % 7
    slots, counts = np.zeros(1, np.int32), np.ones(1, np.int32)
    for name in ("a", "b", "a"):
        slots[0] = history.begin(name, "g", 0, text)
        history.draft(slots, np.full(1, 4, np.int32), 0)
        history.extend(slots, np.ones((1, 5), np.int32), counts)
        history.cut(name, 100)
        history.end(int(slots[0]))
    sequences = history.export_sequences()
    history.clear()
    history.import_sequences(sequences)
