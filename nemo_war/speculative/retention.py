"""Which trajectories a history may forget, and in which order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from nemo_war.speculative.arena import NONE
from nemo_war.speculative.calibration import FIRST_FORM


@dataclass(slots=True)
class Trajectory:
    """One stored trajectory; `tail` and `stored` are those of its slot while it is live.

    Attributes:
        row: number that signs its pages.
        group_id: number of its group; `kin_id` is the same unless it is secluded.
        tail: last page, NONE if no token is stored.
        stored: tokens that are stored, from the first on.
        slot: its slot while a turn runs, else NONE.
        form: how its last drafts began, see `calibration.form_after`; of its last turn while it is live.
    """

    name: str
    group: str
    epoch: int
    learn: bool
    row: int
    group_id: int
    kin_id: int
    tail: int = NONE
    stored: int = 0
    slot: int = NONE
    form: int = FIRST_FORM


@dataclass(slots=True)
class _Group:
    """A group's number, its trajectories live or not, and those that ended with their tokens."""

    number: int
    members: int = 0
    tokens: int = 0
    ended: OrderedDict[str, Trajectory] = field(default_factory=OrderedDict)


class Retention:
    """All trajectories of a history: live ones stay, ended ones go, the longest unused first.

    A prefix that siblings share counts once for each of them here.
    """

    def __init__(self, max_group_tokens: int | None = None) -> None:
        """Hold nothing yet.

        Args:
            max_group_tokens: tokens that the ended trajectories of one group may hold; its latest
                trajectory stays even if it alone has more.
        """
        self._max_group_tokens = max_group_tokens
        self._known: dict[str, Trajectory] = {}
        self._ended: OrderedDict[str, Trajectory] = OrderedDict()
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        """Number of trajectories, live ones included."""
        return len(self._known)

    def get(self, name: str) -> Trajectory | None:
        """The trajectory of this name."""
        return self._known.get(name)

    def all(self) -> Iterator[Trajectory]:
        """Every trajectory."""
        return iter(self._known.values())

    def group_number(self, group: str, fresh: int) -> int:
        """The number of a group that has members, or else the fresh one."""
        return self._groups[group].number if group in self._groups else fresh

    def ended(self) -> Iterator[Trajectory]:
        """Those that ended, the longest unused first."""
        return iter(self._ended.values())

    def oldest(self) -> Trajectory | None:
        """The one to forget next; None when all are live."""
        return next(iter(self._ended.values()), None)

    def add(self, known: Trajectory) -> None:
        """Take in a new, live trajectory."""
        self._known[known.name] = known
        self._groups.setdefault(known.group, _Group(known.group_id)).members += 1

    def revive(self, known: Trajectory) -> None:
        """Take it out of what may go, if it is there: a turn of it runs again, or it is about to change."""
        if self._ended.pop(known.name, None) is not None:
            group = self._groups[known.group]
            del group.ended[known.name]
            group.tokens -= known.stored

    def retire(self, known: Trajectory) -> list[Trajectory]:
        """Its turn is over.

        Returns:
            Trajectories of its group that must go for it.
        """
        group = self._groups[known.group]
        self._ended[known.name] = group.ended[known.name] = known
        group.tokens += known.stored
        excess = 0 if self._max_group_tokens is None else group.tokens - self._max_group_tokens
        surplus = []
        for each in list(group.ended.values())[:-1]:
            if excess <= 0:
                break
            surplus.append(each)
            excess -= each.stored
        return surplus

    def remove(self, known: Trajectory) -> None:
        """Forget it, live or ended."""
        self.revive(known)
        del self._known[known.name]
        group = self._groups[known.group]
        group.members -= 1
        if not group.members:
            del self._groups[known.group]

    def check_integrity(self) -> None:
        """Raise AssertionError, with the reason, if the structures contradict each other."""
        for each in self._known.values():
            if (each.slot == NONE) == (each.name not in self._ended):
                raise AssertionError(f"suffix history: {each.name} is neither live nor evictable, or both")
        for name, group in self._groups.items():
            members = [each for each in self._known.values() if each.group == name]
            ended = [each for each in members if each.name in self._ended]
            if len(members) != group.members or {each.name for each in ended} != set(group.ended):
                raise AssertionError(f"suffix history: the members of group {name} do not add up")
            if sum(each.stored for each in ended) != group.tokens:
                raise AssertionError(f"suffix history: the tokens of group {name} do not add up")
        if len(self._known) != sum(group.members for group in self._groups.values()):
            raise AssertionError("suffix history: a group is missing")
