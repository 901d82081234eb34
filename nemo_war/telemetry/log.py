"""The event log of a run: one JSON object a line, whole up to the last record after a crash.

Every record goes to the operating system as it is appended, so a killed process
loses nothing it had appended; only the machine itself failing can cut the file. A full
disk costs records, never the run: what could not be written is counted, and the count is
on record once there is room again. The reader takes what it can of a damaged file and says what it could not.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, get_args, get_type_hints

from nemo_war import __version__
from nemo_war.errors import UserError
from nemo_war.telemetry.records import SCHEMA, Pass, Record

FILE_NAME = "events.jsonl"
MAX_LINE_BYTES = 1 << 20
"""Longest line the reader looks at: a damaged file may hold no newline at all."""
MAX_TEXT = 4_000
"""Longest string written (an error may be a whole traceback); keeps lines under the bound above."""
MAX_LISTED = 10
"""Damaged lines named one by one; the rest are counted, so that garbage cannot fill memory."""


@dataclass(frozen=True, slots=True)
class Header:
    """First line of a log.

    Attributes:
        schema: version of the records (`nemo_war.telemetry.records.SCHEMA`).
        nemo_war: version of the package that wrote it.
        started: wall-clock time of the run's zero, ISO 8601 with its offset.
    """

    schema: int
    nemo_war: str
    started: str


@dataclass(frozen=True, slots=True)
class EventStream:
    """What could be read of a log: `damage` has one sentence for each thing that could not."""

    records: tuple[Record, ...]
    damage: tuple[str, ...]
    header: Header | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """Stands where records could not be written, for want of room on the disk."""

    lost: int


class EventLog:
    """Appends records to a new file that only its owner can read. Safe to share between threads.

    Attributes:
        lost: records that could not be written.
    """

    def __init__(self, path: Path) -> None:
        """Create the file and write its header.

        Raises:
            UserError: the file exists (two runs in one log could not be told apart) or
                cannot be created.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(os.open(path, flags, 0o600), "wb", buffering=0)  # noqa: SIM115
        except FileExistsError:
            raise UserError(f"{path} exists: a log holds one run, give this one its own folder") from None
        except OSError as error:
            raise UserError(f"{path} cannot be created: {error.strerror}; choose another folder") from None
        self.path = path
        self.lost = self._unreported = 0
        self._lock = threading.Lock()
        header = Header(SCHEMA, __version__, datetime.now(UTC).isoformat(timespec="milliseconds"))
        if not self._write(encode(header)):
            self.close()
            path.unlink()  # or the folder would seem to hold a run
            raise UserError(f"{path} cannot be written: the disk is full; choose another folder")

    def append(self, record: Record) -> None:
        """Write one record and hand it to the operating system, or count it as lost.

        Raises:
            ValueError: the log is closed.
        """
        line = encode(record)
        with self._lock:
            # Both or neither: what little room there is on a full disk is for the count at the end.
            gap = encode(Gap(self._unreported)) if self._unreported else b""
            if self._write(gap + line):
                self._unreported = 0
            else:
                self.lost += 1
                self._unreported += 1

    def close(self) -> None:
        """Close the file, after the count of what could not be written; a second call does nothing."""
        with self._lock:
            if not self._file.closed and self._unreported and self._write(encode(Gap(self._unreported))):
                self._unreported = 0
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, line: bytes) -> bool:
        """Write a line in whole, or leave the file as it is."""
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) == len(line):
                return True
        except OSError:
            pass
        self._file.truncate(end)
        return False


def encode(record: Record | Header | Gap) -> bytes:
    """One line of the log, newline included; non-finite floats are written as NaN and Infinity."""
    fields = {name: _bounded(value) for name, value in dataclasses.asdict(record).items()}
    # Counters come from compiled kernels as numpy scalars, which json does not know: .item() unwraps them.
    text = json.dumps({"kind": type(record).__name__, **fields}, default=lambda scalar: scalar.item())
    return text.encode("ascii") + b"\n"


def read(path: Path) -> EventStream:
    """Read a log, tolerating a cut last line, damaged lines and kinds of newer versions.

    Raises:
        UserError: there is no such file, it is empty, or it cannot be opened.
    """
    try:
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            raise UserError(f"no event log at {path}: name the folder of a run, such as runs/latest")
        if size == 0:
            raise UserError(f"{path} is empty: the run stopped before its first record; run it again")
        with path.open("rb") as file:
            return _read_lines(file)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; check its permissions") from None


def _read_lines(file: BinaryIO) -> EventStream:
    records: list[Record] = []
    header: Header | None = None
    damage = _Damage()
    for number, line in _bounded_lines(file):
        try:
            item = _parse(line)
        except ValueError as error:
            damage.add(number, str(error))
            continue
        if isinstance(item, Header):
            header = item
        elif isinstance(item, Gap):
            damage.add(number, f"{item.lost} records could not be written here: the disk was full")
        elif isinstance(item, _Unknown):
            damage.skip(item.kind)
        else:
            records.append(item)
    return EventStream(tuple(records), damage.sentences(header), header)


def _bounded_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Numbered lines without blank ones; of a line that is too long, just more than the bound."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        rest = line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        if line.strip():
            yield number, line


class _Damage:
    """Collects what could not be read, in bounded space."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._unlisted = 0
        self._kinds: list[str] = []
        self._skipped = 0

    def add(self, line_number: int, reason: str) -> None:
        if len(self._lines) < MAX_LISTED:
            self._lines.append(f"line {line_number}: {reason}")
        else:
            self._unlisted += 1

    def skip(self, kind: str) -> None:
        self._skipped += 1
        if kind not in self._kinds and len(self._kinds) < MAX_LISTED:
            self._kinds.append(kind)

    def sentences(self, header: Header | None) -> tuple[str, ...]:
        said = list(self._lines)
        if self._unlisted:
            said.append(f"{self._unlisted} more damaged lines")
        if header is None:
            said.append("the header is missing: the version that wrote this log is unknown")
        elif header.schema > SCHEMA:
            said.append(f"written with schema {header.schema}, this version knows {SCHEMA}: upgrade nemo-war")
        if self._skipped:
            kinds = ", ".join(self._kinds)
            said.append(f"{self._skipped} records of unknown kinds skipped (newer version?): {kinds}")
        return tuple(said)


@dataclass(frozen=True, slots=True)
class _Unknown:
    """A whole object of a kind this version does not know."""

    kind: str


_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Header, Gap, *get_args(Record))}
_INTEGER_LIMIT = 1 << 63


def _parse(line: bytes) -> Record | Header | Gap | _Unknown:
    """Decode one line.

    Raises:
        ValueError: the line is damaged; the message says how.
    """
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"longer than {MAX_LINE_BYTES} bytes")
    try:
        fields = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        whole = line.endswith(b"\n")
        raise ValueError("not JSON" if whole else "cut off: the run was stopped while writing it") from None
    kind = fields.get("kind") if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise ValueError("not a record: it names no kind")
    if kind not in _KINDS:
        return _Unknown(_shown(kind))
    item: Record | Header | Gap = _decode(_KINDS[kind], fields)
    return item


def _decode(cls: type[Any], fields: object) -> Any:
    """Build `cls` from JSON; fields it does not know are newer than it and ignored."""
    if not isinstance(fields, dict):
        raise ValueError(f"{cls.__name__} is {_shown(fields)}, not an object")
    values = {}
    for field, hint in _FIELDS[cls]:
        if field.name in fields:
            values[field.name] = _checked(f"{cls.__name__}.{field.name}", fields[field.name], hint)
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"{cls.__name__} lacks {field.name}")
    return cls(**values)


def _fields_of(cls: type[Any]) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    hints = get_type_hints(cls)
    return tuple((field, hints[field.name]) for field in dataclasses.fields(cls))


# Resolved once: resolving the types costs more than decoding a record.
_FIELDS = {Pass: _fields_of(Pass)} | {cls: _fields_of(cls) for cls in _KINDS.values()}


def _checked(name: str, value: object, hint: Any) -> object:
    """The value if it is of the declared type, so that the report need not doubt it."""
    if hint is Pass:
        return _decode(Pass, value)
    allowed = get_args(hint) or (hint,)
    # bool is an int to isinstance, and a count that is `true` is damage.
    if type(value) is int and abs(value) < _INTEGER_LIMIT and (int in allowed or float in allowed):
        return value if int in allowed else float(value)
    if type(value) in allowed and type(value) is not int:
        return value
    raise ValueError(f"{name} is {_shown(value)}")


def _bounded(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return value[: MAX_TEXT - 1] + "…"
    return value


def _shown(value: object) -> str:
    """A short form that cannot smuggle control characters to a terminal."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
