"""Token sequences outside of a history: as arrays, as bytes between replicas, and as a file.

The bytes are checked ones (see `checked_file`): one line of JSON (names, groups, epochs,
lengths), the tokens as little-endian int32 and a bit for each that was sampled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nemo_war import checked_file
from nemo_war.checked_file import Kind
from nemo_war.errors import UserError

KIND = Kind(
    "suffix history",
    1,
    wanted="name a file that `save` wrote",
    remedy="delete it to start empty",
    most_bytes=1 << 32,  # twice what the largest history takes that can be configured
)
FOLDER = "history"
"""Where a run keeps its histories, below its own folder."""
SUFFIX = ".suffixes"
_RESTORED = "restored/"
_MOST_HEADER = 1 << 26
"""Names and numbers of half a million trajectories, which take several times that memory as objects."""
_MAX_EPOCH = 1 << 30
"""More refits than any run has; differences of such epochs still fit their 32 bits."""


class Sequence(NamedTuple):
    """One trajectory: `tokens` int32[n], and bool[n] whether a model `sampled` them or was given them."""

    trajectory: str
    group: str
    epoch: int
    tokens: np.ndarray
    sampled: np.ndarray


@dataclass(frozen=True, slots=True)
class Sequences:
    """Trajectories with what is known of them.

    Attributes:
        tokens: int32[total], one after the other.
        sampled: bool[total], whether a model sampled the token.
        offsets: int64[n + 1], where each begins; the last is the total.
        epochs: int32[n], policy epoch of the latest turn.
        groups, trajectories: n names.
    """

    tokens: np.ndarray
    sampled: np.ndarray
    offsets: np.ndarray
    epochs: np.ndarray
    groups: tuple[str, ...]
    trajectories: tuple[str, ...]

    @classmethod
    def join(cls, sequences: list[Sequence]) -> Sequences:
        """All of them, in this order."""
        return cls(
            tokens=np.concatenate([np.zeros(0, np.int32), *(each.tokens for each in sequences)]),
            sampled=np.concatenate([np.zeros(0, bool), *(each.sampled for each in sequences)]),
            offsets=np.cumsum([0, *(len(each.tokens) for each in sequences)]).astype(np.int64),
            epochs=np.array([each.epoch for each in sequences], np.int32),
            groups=tuple(each.group for each in sequences),
            trajectories=tuple(each.trajectory for each in sequences),
        )

    def rows(self) -> Iterator[Sequence]:
        """One after the other."""
        for index, name in enumerate(self.trajectories):
            span = slice(self.offsets[index], self.offsets[index + 1])
            yield Sequence(
                name, self.groups[index], int(self.epochs[index]), self.tokens[span], self.sampled[span]
            )

    def cut(self, lengths: Mapping[str, int]) -> Sequences:
        """Of each trajectory the first tokens, as many as stand there; those not named stay whole."""
        return Sequences.join([_first(each, lengths.get(each.trajectory)) for each in self.rows()])

    def check_vocabulary(self, size: int, source: str) -> None:
        """Refuse tokens of another model: a draft of ids it does not have would break the engine.

        Raises:
            UserError: a token is not below `size`; `source` is named.
        """
        if self.tokens.min(initial=0) < 0 or self.tokens.max(initial=0) >= size:
            raise UserError(
                f"suffix history {source}: it has tokens beyond this model's vocabulary of {size}; "
                "name one that was kept with this model"
            )


def _first(sequence: Sequence, length: int | None) -> Sequence:
    """The first tokens of a sequence; None: all of them."""
    return sequence._replace(tokens=sequence.tokens[:length], sampled=sequence.sampled[:length])


def find_archives(path: Path) -> list[Path]:
    """The history files that a path means: itself, those in the folder, or those that the run in it kept.

    Raises:
        UserError: there is none, or they cannot be looked at.
    """
    try:
        if path.is_file():
            return [path]
        folder = path / FOLDER if (path / FOLDER).is_dir() else path
        found = sorted(folder.glob(f"*{SUFFIX}"))
    except OSError as error:
        raise UserError(f"suffix history {path}: {error.strerror}; name a file that `save` wrote") from None
    if not found:
        raise UserError(f"suffix history {path}: no {SUFFIX} file there; name one, or the folder of a run")
    return found


def read_archives(path: Path) -> Sequences:
    """All histories that a path means, as one: oldest epoch first, each trajectory once and at its longest.

    Raises:
        UserError: see `find_archives` and `read_archive`.
    """
    longest: dict[str, Sequence] = {}
    for file in find_archives(path):
        for each in read_archive(str(file)).rows():
            known = longest.get(each.trajectory)
            if known is None or len(each.tokens) > len(known.tokens):
                longest[each.trajectory] = each
    return Sequences.join(sorted(longest.values(), key=lambda each: each.epoch))


def as_restored(sequences: Sequences, newest_epoch: int) -> Sequences:
    """The sequences of an earlier run: renamed, as runs name theirs alike, and with epochs of this one.

    Args:
        sequences: what was read.
        newest_epoch: what the newest of its epochs becomes; older ones keep their distance.
    """
    shift = newest_epoch - int(max(sequences.epochs, default=newest_epoch))
    names = [_restored_name(each) for each in sequences.rows()]
    return replace(sequences, epochs=sequences.epochs + np.int32(shift), trajectories=tuple(names))


def _restored_name(sequence: Sequence) -> str:
    """The same whenever the same text is restored, so that passing it on changes nothing."""
    if sequence.trajectory.startswith(_RESTORED):
        return sequence.trajectory
    digest = hashlib.blake2b(sequence.trajectory.encode() + sequence.tokens.tobytes(), digest_size=8)
    return _RESTORED + digest.hexdigest()


def encode(sequences: Sequences) -> bytes:
    """The bytes that stand for them."""
    return checked_file.pack(KIND, _body(sequences))


def decode(content: bytes, source: str) -> Sequences:
    """The sequences that `encode` made bytes of.

    Args:
        content: whatever was sent.
        source: what errors call it.

    Raises:
        UserError: it is something else, of another version, or damaged.
    """
    return _parse(source, checked_file.unpack(KIND, content, source))


def write_archive(path: str, sequences: Sequences) -> None:
    """Write a file of mode 0600; a crash leaves the old file or the new one, never a part."""
    checked_file.write(Path(path), KIND, _body(sequences))


def read_archive(path: str) -> Sequences:
    """Read what `write_archive` wrote.

    Raises:
        UserError: the file cannot be read, is of another kind or version, or is damaged.
    """
    return _parse(path, checked_file.read(Path(path), KIND))


def _body(sequences: Sequences) -> bytes:
    header = {
        "trajectories": sequences.trajectories,
        "groups": sequences.groups,
        "epochs": sequences.epochs.tolist(),
        "lengths": np.diff(sequences.offsets).tolist(),
    }
    tokens, sampled = sequences.tokens.astype("<i4"), np.packbits(sequences.sampled)
    return b"".join((json.dumps(header).encode(), b"\n", tokens.tobytes(), sampled.tobytes()))


def _parse(path: str, body: bytes) -> Sequences:
    head, _, data = body.partition(b"\n")
    try:
        if len(head) > _MOST_HEADER:
            raise ValueError("its header is larger than any")
        header = json.loads(head)
        lengths = np.array(header["lengths"], np.int64)
        epochs = np.array(header["epochs"], np.int64)
        groups, trajectories = tuple(map(str, header["groups"])), tuple(map(str, header["trajectories"]))
        if lengths.ndim != 1 or epochs.ndim != 1:
            raise ValueError("lengths and epochs must be lists of numbers")
        if len({len(lengths), len(epochs), len(groups), len(trajectories)}) > 1:
            raise ValueError("the lists differ in length")
        "".join((*groups, *trajectories)).encode()  # JSON can hold halves of characters, which are no names
        if ((lengths < 0) | (lengths > len(data) // 4)).any() or (np.abs(epochs) > _MAX_EPOCH).any():
            raise ValueError("a length or an epoch is out of range")
        total = int(lengths.sum())
        bits = np.frombuffer(data, np.uint8, offset=4 * total)
        if len(bits) != (total + 7) // 8:
            raise ValueError("the tokens are not as many as the lengths say")
        return Sequences(
            tokens=np.frombuffer(data, "<i4", count=total).astype(np.int32),
            sampled=np.unpackbits(bits)[:total].astype(bool),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            epochs=epochs.astype(np.int32),
            groups=groups,
            trajectories=trajectories,
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(f"suffix history {path}: malformed ({error}); delete it to start empty") from None
