"""What was learned, as it goes to disk and comes back: arrays and texts by name.

The file is a checked one (see `checked_file`): a line of JSON with dtype and shape of each
array and with the texts, then the arrays, one after the other. Whatever is learned here
is counts, times and shares: a negative or a non-finite number is damage.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nemo_war import checked_file
from nemo_war.checked_file import Kind

SUFFIX = ".state"
_MOST_BYTES = 1 << 26
KIND = Kind(
    "WAR state",
    1,
    wanted="resume from a folder that a run's checkpoint wrote",
    remedy="remove the checkpoint it is in, and the one before it is resumed from",
    most_bytes=_MOST_BYTES,
)
_DTYPES = ("<f4", "<f8", "<i8")
_MOST_HEADER = 1 << 23
_MOST_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class State:
    """Arrays (float32, float64 or int64; finite, not negative) and lists of texts, by name."""

    arrays: Mapping[str, np.ndarray]
    texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def join(cls, parts: Mapping[str, State]) -> State:
        """One state of several; `part` takes it apart again."""
        return cls(
            {f"{part}/{name}": array for part, each in parts.items() for name, array in each.arrays.items()},
            {f"{part}/{name}": texts for part, each in parts.items() for name, texts in each.texts.items()},
        )

    def part(self, name: str) -> State:
        """The state that was joined under this name; empty if there is none."""
        start = f"{name}/"
        return State(
            {key.removeprefix(start): array for key, array in self.arrays.items() if key.startswith(start)},
            {key.removeprefix(start): texts for key, texts in self.texts.items() if key.startswith(start)},
        )

    def array(self, name: str, like: np.ndarray, most: float = math.inf) -> np.ndarray:
        """A copy of the array of this name.

        Args:
            name: which one.
            like: of the shape and dtype that it must have.
            most: what no entry may exceed.

        Raises:
            ValueError: it is not there, or not such an array.
        """
        found = self.arrays.get(name)
        if found is None:
            raise ValueError(f"{name} is missing")
        if found.shape != like.shape or found.dtype != like.dtype:
            raise ValueError(f"{name} is {_described(found)}, not {_described(like)}")
        if (found > most).any():
            raise ValueError(f"{name} has a number above {most:g}")
        return found.copy()


def write(path: Path, state: State) -> None:
    """Write a file of mode 0600; a crash leaves the old file or the new one, never a part.

    Raises:
        OSError: it could not be written.
    """
    arrays = {name: np.asarray(array, _stored(array.dtype)) for name, array in state.arrays.items()}
    header = {
        "arrays": [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()],
        "texts": state.texts,
    }
    body = json.dumps(header).encode() + b"\n" + b"".join(array.tobytes() for array in arrays.values())
    checked_file.write(path, KIND, body)


def read(path: Path) -> State:
    """Read what `write` wrote.

    Raises:
        UserError: the file cannot be read, is of another kind or version, is damaged or makes no sense.
    """
    head, _, data = checked_file.read(path, KIND).partition(b"\n")
    try:
        if len(head) > _MOST_HEADER:
            raise ValueError("its header is larger than any")
        header = json.loads(head)
        return State(_arrays(header["arrays"], data), _texts(header["texts"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise KIND.malformed(path, error) from None


def _arrays(listed: Any, data: bytes) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    at = 0
    for name, dtype, shape in listed:
        if dtype not in _DTYPES or len(shape) > _MOST_DIMENSIONS:
            raise ValueError("an array is of no known dtype, or of too many dimensions")
        if not all(type(size) is int and 0 <= size <= _MOST_BYTES for size in shape):
            raise ValueError("the size of an array is out of range")
        count = math.prod(shape)
        if count * int(dtype[2:]) > len(data) - at:  # before anything of that size is made
            raise ValueError("the arrays are larger than the file")
        array = np.frombuffer(data, dtype, count, at).reshape(shape)
        if not np.isfinite(array).all() or (array < 0).any():
            raise ValueError("an array has a number that is negative or not finite")
        arrays[str(name)] = array
        at += array.nbytes
    if at != len(data):
        raise ValueError("the file is larger than its arrays")
    return arrays


def _texts(listed: Any) -> dict[str, tuple[str, ...]]:
    if not all(isinstance(text, str) for texts in listed.values() for text in texts):
        raise ValueError("a text is none")
    return {str(name): tuple(texts) for name, texts in listed.items()}


def _stored(dtype: np.dtype) -> str:
    stored = dtype.newbyteorder("<").str
    if stored not in _DTYPES:
        raise TypeError(f"a state has no arrays of {dtype}")
    return stored


def _described(array: np.ndarray) -> str:
    return f"{array.dtype}{list(array.shape)}"
