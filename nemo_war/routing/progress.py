"""How much a trajectory still has to do, from its siblings, from history and from how far it is.

What ended is a biased sample of what is live, as short trajectories end first: within a
step, what remains would be taken for a fifth of what it is. So live ones count too, for as
far as they got. The hazard, the share of trajectories that end after so many turns among
those that got so far, follows from both (Kaplan and Meier, 1958), and the mean residual
life from the hazards. Nobody has been beyond the longest so far: there the last hazard is
taken to stay, or, while nobody has ended, a trajectory to go on for as long as it has gone
(Gott's rule).

Siblings end earlier or later than others alike, so that a group's hazards are those of all
by a factor (a frailty with a gamma prior; Vaupel and others, 1979). Outputs of later turns
are expected to be as long as the trajectory's own and, while these are few, as all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nemo_war.snapshot import State

_TURNS = 256
"""Numbers of turns done that are told apart; beyond, a trajectory counts as one that has done so many."""
_MEMORY = 4096
"""Ended trajectories after which half of what is known is forgotten: some steps of a large job."""
_STALE = 16
"""Turns after which the residual lives are computed again."""
_SMOOTHING = 2.0
"""Trajectories that each hazard is believed to have been seen on already, at the mean of all hazards."""
_LEAST = 1e-6
"""Hazard taken for none."""
_GROUPS = 4096
"""Groups remembered."""
_GROUP_PRIOR = 8.0
"""Ends after which a group's own hazards count as much as those of all."""
_OWN_PRIOR = 8.0
"""Turns after which a trajectory's own outputs do."""
_MOST_COUNTED = 1e15
"""No count is larger; sums of such are exact."""
_FIRST_GUESS = 100.0
"""Output tokens of a turn, before any turn was answered."""


class Remaining(NamedTuple):
    """What a trajectory is expected to need from here on.

    Attributes:
        turns: turns, the coming one included.
        output_tokens: tokens to generate in them.
    """

    turns: float
    output_tokens: float


@dataclass(slots=True)
class _Live:
    """What a trajectory has done.

    Attributes:
        group: its own.
        turns, output_tokens: answered so far.
        expected: ends that the hazards it survived made expect.
        asked: another turn is about to be placed.
    """

    group: str
    turns: int = 0
    output_tokens: int = 0
    expected: float = 0.0
    asked: bool = False


_UNKNOWN = _Live("")
"""A trajectory that has done nothing yet; only to be read."""


@dataclass(slots=True)
class _Group:
    """How many of its trajectories ended, and how many would have by the hazards of all."""

    ended: int = 0
    expected: float = 0.0


class _Lives:
    """When trajectories end: counts by turns done, and what follows from them."""

    def __init__(self) -> None:
        self._ended = np.zeros(_TURNS)
        self._went_on = np.zeros(_TURNS)
        self._changes = _STALE
        self._hazards = np.zeros(_TURNS)
        self._residual = np.ones(_TURNS).tolist()

    def ended(self, done: int) -> None:
        """One ended after so many turns."""
        self._ended[min(done, _TURNS - 1)] += 1
        self._changes += 1
        if self._ended.sum() > _MEMORY:
            self._ended /= 2
            self._went_on /= 2

    def went_on(self, done: int) -> None:
        """One had another turn after so many."""
        self._went_on[min(done, _TURNS - 1)] += 1
        self._changes += 1

    def hazard(self, done: int) -> float:
        """Probability that one ends, having done so many turns."""
        self._refresh()
        return self._hazards.item(min(done, _TURNS - 1))

    def residual(self, done: int) -> float:
        """Mean of the turns still to come after so many, if there is another."""
        self._refresh()
        return self._residual[min(done, _TURNS - 1)]

    def quantile(self, done: int, frailty: float, quantile: float) -> float:
        """Turns still to come after so many, that suffice with this probability."""
        self._refresh()
        survival = 1.0
        for turns in range(1, _TURNS):
            survival *= 1.0 - min(1.0, frailty * self.hazard(done + turns))
            if survival <= 1.0 - quantile:
                return float(turns)
        return float(_TURNS)

    def state(self) -> State:
        """The counts; what follows from them is computed anew."""
        return State({"ended": self._ended.copy(), "went_on": self._went_on.copy()})

    def restore(self, state: State) -> None:
        """Go on with the counts of a state.

        Raises:
            ValueError: they are not such counts, and nothing was changed.
        """
        ended = state.array("ended", self._ended, most=_MEMORY)
        went_on = state.array("went_on", self._went_on, most=_MOST_COUNTED)
        self._ended, self._went_on, self._changes = ended, went_on, _STALE

    def _refresh(self) -> None:
        if self._changes < _STALE:
            return
        self._changes = 0
        at_risk = self._ended + self._went_on
        mean = self._ended.sum() / max(1.0, at_risk.sum())
        self._hazards = (self._ended + _SMOOTHING * mean) / (at_risk + _SMOOTHING)
        longest = int(at_risk.nonzero()[0].max(initial=0))
        beyond = min(max(longest, 1.0), 1.0 / max(self._hazards.item(longest), _LEAST))
        residual = [beyond] * _TURNS
        for done in range(longest - 1, -1, -1):
            residual[done] = 1.0 + (1.0 - self._hazards.item(done + 1)) * residual[done + 1]
        self._residual = residual


class Progress:
    """Follows live trajectories, and predicts what is left of them."""

    def __init__(self) -> None:
        self._live: dict[str, _Live] = {}
        self._groups: dict[str, _Group] = {}
        self._lives = _Lives()
        self._turns = self._output_tokens = 0.0

    def turn(self, trajectory: str, group: str) -> None:
        """A turn is about to be placed; asked again for the same turn it changes nothing."""
        live = self._live.get(trajectory)
        if live is None:
            live = self._live[trajectory] = _Live(group)
        if not live.asked and live.turns:
            hazard = self._lives.hazard(live.turns)
            live.expected += hazard
            self._group(group).expected += hazard
            self._lives.went_on(live.turns)
        live.asked = True

    def answered(self, trajectory: str, output_tokens: int) -> None:
        """The turn generated so many tokens."""
        live = self._live.get(trajectory)
        if live is not None and live.asked:
            live.turns += 1
            live.output_tokens += output_tokens
            live.asked = False
            self._turns += 1
            self._output_tokens += output_tokens

    def end(self, trajectory: str) -> None:
        """It is over."""
        live = self._live.pop(trajectory, None)
        if live is not None and live.turns:
            group = self._group(live.group)
            group.ended += 1
            group.expected += self._lives.hazard(live.turns)
            self._lives.ended(live.turns)

    def remaining(self, trajectory: str, group: str) -> Remaining:
        """What is left of a trajectory, before its coming turn: the mean."""
        live = self._live.get(trajectory, _UNKNOWN)
        turns = 1.0 + (self._lives.residual(live.turns) - 1.0) / self._frailty(group, live)
        return Remaining(turns, turns * self._tokens_per_turn(live))

    def quantile(self, trajectory: str, group: str, quantile: float) -> Remaining:
        """The same, but as much as will suffice with this probability, if outputs are as long as expected."""
        live = self._live.get(trajectory, _UNKNOWN)
        turns = self._lives.quantile(live.turns, self._frailty(group, live), quantile)
        return Remaining(turns, turns * self._tokens_per_turn(live))

    def state(self) -> State:
        """What was learned. Of live trajectories that is how far they got, and neither names nor places."""
        groups = self._groups.values()
        own = State(
            {
                "totals": np.array([self._turns, self._output_tokens]),
                "group_ended": np.array([group.ended for group in groups], np.int64),
                "group_expected": np.array([group.expected for group in groups], np.float64),
            },
            {"groups": tuple(self._groups)},
        )
        return State.join({"all": own, "lives": self._lives.state()})

    def restore(self, state: State) -> None:
        """Go on with what a state learned.

        Raises:
            ValueError: it is no state of progress, and nothing was changed.
        """
        own, lives = state.part("all"), _Lives()
        names = own.texts.get("groups", ())
        if len(names) > _GROUPS or len(set(names)) < len(names):
            raise ValueError("groups are too many, or one is there twice")
        turns, output_tokens = own.array("totals", np.zeros(2), _MOST_COUNTED).tolist()
        ended = own.array("group_ended", np.zeros(len(names), np.int64), _MOST_COUNTED).tolist()
        expected = own.array("group_expected", np.zeros(len(names)), _MOST_COUNTED).tolist()
        lives.restore(state.part("lives"))
        self._lives, self._turns, self._output_tokens = lives, turns, output_tokens
        self._groups = dict(zip(names, map(_Group, ended, expected), strict=True))

    def _tokens_per_turn(self, live: _Live) -> float:
        of_all = self._output_tokens / self._turns if self._turns else _FIRST_GUESS
        return (live.output_tokens + _OWN_PRIOR * of_all) / (live.turns + _OWN_PRIOR)

    def _frailty(self, group: str, live: _Live) -> float:
        """As its siblings show it: that the trajectory itself survived is in its residual life already."""
        known = self._groups.get(group)
        if known is None:
            return 1.0
        expected = max(0.0, known.expected - live.expected)
        return (known.ended + _GROUP_PRIOR) / (expected + _GROUP_PRIOR)

    def _group(self, name: str) -> _Group:
        group = self._groups.get(name)
        if group is None:
            if len(self._groups) >= _GROUPS:
                del self._groups[next(iter(self._groups))]
            group = self._groups[name] = _Group()
        return group
