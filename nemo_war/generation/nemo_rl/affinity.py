"""Which rows of a batch go to which replica, where NeMo-RL cuts the batch by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """A turn of a batch.

    Attributes:
        home: replica that served its trajectory last; None at a first turn.
        tokens: length of its prompt, all of which another replica would compute again.
        group: shared with its siblings, which share a prompt.
    """

    home: int | None
    tokens: int
    group: str


def shares(rows: int, replicas: int) -> list[int]:
    """How many rows each replica gets when NeMo-RL cuts: as many as rounded up, the last ones fewer."""
    size = -(-rows // replicas)
    return [min(size, max(0, rows - number * size)) for number in range(replicas)]


def order(rows: Sequence[Row], replicas: int) -> list[int]:
    """The order of rows in which cutting leaves trajectories at home as far as the shares allow.

    The longest are seated first. Rows without a home, and those that find no room there,
    go where there is most, siblings one after the other.

    Returns:
        Indices of `rows`, each once.
    """
    room = shares(len(rows), replicas)
    seated: list[list[int]] = [[] for _ in range(replicas)]
    left = []
    for index in sorted(range(len(rows)), key=lambda index: -rows[index].tokens):
        home = rows[index].home
        if home is not None and len(seated[home]) < room[home]:
            seated[home].append(index)
        else:
            left.append(index)
    target = None
    for index in sorted(left, key=lambda index: (rows[index].group, index)):
        if target is None or len(seated[target]) == room[target]:
            target = max(range(replicas), key=lambda number: room[number] - len(seated[number]))
        seated[target].append(index)
    return [index for rows_of_one in seated for index in sorted(rows_of_one)]
