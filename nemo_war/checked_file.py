"""Files that are whole, of a known kind and of this version, or refused.

The first line names kind and version, the second has the BLAKE2b digest of all that
follows. Nothing in such a file is executed or unpickled.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nemo_war.errors import UserError

_MAKER = "nemo_war "
_MOST_SHOWN = 16
"""Characters of another version's number that a message repeats."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a file is.

    Attributes:
        name: how its first line and messages call it.
        version: the one that is written, and the only one that is read.
        wanted: what the user may name instead of a file that is not of this kind.
        remedy: what the user can do about one that cannot be used.
        most_bytes: a larger file is not read.
    """

    name: str
    version: int
    wanted: str
    remedy: str
    most_bytes: int

    def malformed(self, source: object, reason: object) -> UserError:
        """The error for what is whole and makes no sense."""
        return UserError(f"{self.name} {source}: malformed ({reason}); {self.remedy}")


def pack(kind: Kind, body: bytes) -> bytes:
    """The body with what tells that it is whole, and what it is."""
    digest = hashlib.blake2b(body).hexdigest()
    return f"{_MAKER}{kind.name} {kind.version}\n{digest}\n".encode() + body


def unpack(kind: Kind, content: bytes, source: object) -> bytes:
    """The body of what `pack` made.

    Args:
        kind: what it has to be.
        content: whatever was read or sent.
        source: what errors call it.

    Raises:
        UserError: it is of another kind or version, or damaged.
    """
    first, _, rest = content.partition(b"\n")
    start = f"{_MAKER}{kind.name} ".encode()
    if not first.startswith(start):
        raise UserError(f"{kind.name} {source}: not a {kind.name}; {kind.wanted}")
    if first != start + str(kind.version).encode():
        found = first[len(start) :][:_MOST_SHOWN].decode("ascii", errors="backslashreplace")
        raise UserError(
            f"{kind.name} {source}: format {found}, this version reads {kind.version}; "
            f"use the version that wrote it, or {kind.remedy}"
        )
    digest, _, body = rest.partition(b"\n")
    if digest != hashlib.blake2b(body).hexdigest().encode():
        raise UserError(f"{kind.name} {source}: damaged, its checksum is wrong; {kind.remedy}")
    return body


def write(path: Path, kind: Kind, body: bytes) -> None:
    """Write a file of mode 0600; a crash leaves the old file or the new one, never a part.

    Raises:
        OSError: it could not be written, and the old one is as it was.
    """
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")  # mkstemp: mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(pack(kind, body))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    sync(path.parent)


def read(path: Path, kind: Kind) -> bytes:
    """The body of what `write` wrote.

    Raises:
        UserError: the file cannot be read, is of another kind or version, or is damaged.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe or a device has no end
            raise UserError(f"{kind.name} {path}: not a file; {kind.wanted}")
        if found.st_size > kind.most_bytes:
            raise UserError(f"{kind.name} {path}: larger than any ({kind.most_bytes} bytes); {kind.remedy}")
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{kind.name} {path}: {error.strerror}; {kind.wanted}") from None
    return unpack(kind, content, path)


def sync(path: Path) -> None:
    """Make what a file holds, or the names in a folder, outlast a failure of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
