"""The trajectories that are under way: their names, and how each is known again.

A trajectory without a name of its own gets one at its first turn, and stands where its
last answer left it. A prompt that goes on from there is its next turn. Siblings may
stand at the same place, when their answers are equal; they are then taken in rotation,
so that each goes on once. A prompt that continues nothing begins a new trajectory, in
the group of all that begin with the same prompt.

A trajectory is over when its client says so. Few do; memory is bounded all the same: one
place per trajectory, and trajectories that are idle for long, or are more than the limit,
are over too.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from nemo_war.routing.http.lengths import Course, Lengths
from nemo_war.routing.http.prompt import Mark, Prompt

_CANDIDATES = 64
"""Trajectories looked at under one key: a group is seldom larger, and a common prompt must not cost more."""


@dataclass(slots=True)
class _Trajectory:
    """One under way.

    Attributes:
        group: shared with its siblings.
        course: what is known of its length.
        turns: begun so far.
        in_flight: of these, not finished.
        over: there will be no other turn.
        marks: where it stands.
    """

    group: str
    course: Course
    turns: int = 0
    in_flight: int = 0
    over: bool = False
    marks: list[Mark] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn of a trajectory: its names, its number from 0, and what is known of its length."""

    trajectory: str
    group: str
    turn: int
    course: Course


class Trajectories:
    """All trajectories under way.

    Attributes:
        lengths: what was learned of the length of their prompts.
    """

    def __init__(self, idle_s: float, limit: int, ended: Callable[[str], None]) -> None:
        """Know none.

        Args:
            idle_s: time without a turn after which one is over.
            limit: so many are remembered; the longest idle goes first.
            ended: told of each that is over.
        """
        self._idle_s, self._limit, self._ended = idle_s, limit, ended
        self._known: dict[str, _Trajectory] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()
        self._standing: dict[str | int, OrderedDict[str, Mark]] = {}
        self._numbers = itertools.count()
        self.lengths = Lengths()

    def __len__(self) -> int:
        """Trajectories under way."""
        return len(self._known)

    @property
    def active(self) -> int:
        """Of these, with a turn that is not finished."""
        return len(self._known) - len(self._idle)

    def begin(self, prompt: Prompt, name: str | None = None, group: str | None = None) -> Begun:
        """A turn begins; `finish` it.

        Args:
            prompt: what is asked.
            name: its trajectory, where the request says so.
            group: likewise.
        """
        if name is None:
            name = self._recognise(prompt)
        known = self._known.get(name) if name is not None else None
        if known is None or name is None:
            group = group or prompt.group
            name = name or f"{group}.{next(self._numbers)}"
            known = self._known[name] = _Trajectory(group, self.lengths.course())
        self._idle.pop(name, None)
        known.turns += 1
        known.in_flight += 1
        known.over = False
        self._shrink()
        return Begun(name, known.group, known.turns - 1, known.course)

    def stands(self, name: str, marks: list[Mark]) -> None:
        """It was answered; where it stood before nobody will find it."""
        known = self._known[name]
        self._leave(name, known)
        known.marks = marks
        for mark in marks:
            self._standing.setdefault(mark.key, OrderedDict())[name] = mark

    def finish(self, name: str, now: float) -> None:
        """A turn is over, however it ended."""
        known = self._known[name]
        known.in_flight -= 1
        if not known.in_flight:
            self._idle[name] = now
            if known.over:
                self._end(name)
            self._shrink()

    def end(self, name: str) -> None:
        """It is said to be over: it is from now on, or when its turn is; no effect where it is not known."""
        if name in self._idle:
            self._end(name)
        elif name in self._known:
            self._known[name].over = True

    def expire(self, now: float) -> None:
        """End those that were idle for too long."""
        while self._idle and now - next(iter(self._idle.values())) > self._idle_s:
            self._end(next(iter(self._idle)))

    def check_integrity(self) -> bool:
        """Whether the books agree with each other; for tests."""
        standing = {(key, name) for key, names in self._standing.items() for name in names}
        marked = {(mark.key, name) for name, known in self._known.items() for mark in known.marks}
        idle = {name for name, known in self._known.items() if not known.in_flight}
        return standing == marked and idle == self._idle.keys() and all(self._standing.values())

    def _recognise(self, prompt: Prompt) -> str | None:
        for key in prompt.beginnings():
            names = self._standing.get(key)
            for name, mark in itertools.islice(names.items(), _CANDIDATES) if names else ():
                if prompt.continues(mark):
                    self._standing[key].move_to_end(name)
                    return name
        return None

    def _shrink(self) -> None:
        while len(self._known) > self._limit and self._idle:
            self._end(next(iter(self._idle)))

    def _end(self, name: str) -> None:
        """An idle one is over."""
        del self._idle[name]
        self._leave(name, self._known.pop(name))
        self._ended(name)

    def _leave(self, name: str, known: _Trajectory) -> None:
        for mark in known.marks:
            names = self._standing[mark.key]
            del names[name]
            if not names:
                del self._standing[mark.key]
        known.marks = []
