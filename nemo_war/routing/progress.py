"""How much a trajectory still has to do, from its siblings, from history and from how far it is.

Trajectories that ended are examples: of those that lived at least as long as this one
(in turns), the rest they had is what this one may have, siblings counting for more than
strangers. That is the empirical mean residual life, as in Libra (arXiv 2606.03077),
with a high quantile beside the mean, since room must be kept for what may well come.
Without examples a trajectory is expected to go on for as long as it has gone (Gott's rule).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

_EXAMPLES = 512
"""Ended trajectories remembered of all groups: some steps of an ordinary job, and 20 microseconds to read."""
_GROUPS, _SIBLINGS = 4096, 16
"""Groups remembered apart, and ended siblings in each: the last attempts tell most."""
_SIBLING_WEIGHT = 4.0
"""Examples a sibling counts for: the task explains more of a trajectory's length than the policy does."""
_HIGH = 0.9
"""The high quantile."""


@dataclass(frozen=True, slots=True)
class Remaining:
    """What a trajectory is expected to need from here on.

    Attributes:
        turns: turns, the coming one included.
        output_tokens: tokens to generate in them.
        growth: tokens by which its context will grow in all, tool results included.
        growth_high: the same, at the 90th percentile.
    """

    turns: float
    output_tokens: float
    growth: float
    growth_high: float


@dataclass(slots=True)
class _Live:
    """What a trajectory has done: its context's size before each turn, and the outputs."""

    group: str
    contexts: list[int]
    outputs: list[int]


class _Examples:
    """The rests of ended trajectories, read at once for all that lived long enough.

    A trajectory's rest is one row for each number of turns done: (turns, output, growth)
    that remained before the next. Turns beyond the last row count as the last.
    """

    def __init__(self, trajectories: int, turns: int = 128) -> None:
        self._rests = np.zeros((trajectories, turns, 3))
        self._turns = np.zeros(trajectories, dtype=np.int64)
        self._next = 0

    def add(self, rest: np.ndarray) -> None:
        row, self._next = self._next, (self._next + 1) % len(self._turns)
        kept = rest[: self._rests.shape[1]]
        self._rests[row, : len(kept)] = kept
        self._turns[row] = len(kept)

    def at(self, done: int) -> np.ndarray:
        """float64[n, 3] of those that had more turns to go after so many."""
        return self._rests[self._turns > done, min(done, self._rests.shape[1] - 1)]


class Progress:
    """Follows live trajectories, and predicts what is left of them."""

    def __init__(self) -> None:
        self._live: dict[str, _Live] = {}
        self._all = _Examples(_EXAMPLES)
        self._siblings: dict[str, deque[np.ndarray]] = {}

    def turn(self, trajectory: str, group: str, prompt_tokens: int) -> None:
        """A turn is about to be placed; asked again for the same turn it changes nothing."""
        live = self._live.setdefault(trajectory, _Live(group, [], []))
        if len(live.contexts) == len(live.outputs):
            live.contexts.append(prompt_tokens)

    def answered(self, trajectory: str, output_tokens: int) -> None:
        """The turn generated so many tokens."""
        live = self._live.get(trajectory)
        if live is not None and len(live.outputs) < len(live.contexts):
            live.outputs.append(output_tokens)

    def end(self, trajectory: str) -> None:
        """It is over, and an example from now on."""
        live = self._live.pop(trajectory, None)
        if live is None or not live.outputs:
            return
        done = len(live.outputs)
        sizes = np.array(live.contexts[:done], dtype=np.float64)
        outputs = np.array(live.outputs, dtype=np.float64)
        final = sizes[-1] + outputs[-1]
        rest = np.stack(
            [np.arange(done, 0, -1), outputs[::-1].cumsum()[::-1], final - sizes], axis=1
        )  # what remained before each turn
        self._all.add(rest)
        if live.group not in self._siblings and len(self._siblings) >= _GROUPS:
            del self._siblings[next(iter(self._siblings))]
        self._siblings.setdefault(live.group, deque(maxlen=_SIBLINGS)).append(rest)

    def remaining(self, trajectory: str, group: str) -> Remaining:
        """What is left of a trajectory, before its coming turn."""
        live = self._live.get(trajectory)
        done = len(live.outputs) if live else 0
        siblings = [rest[done] for rest in self._siblings.get(group, ()) if len(rest) > done]
        strangers = self._all.at(done)
        examples = np.concatenate([np.array(siblings), strangers]) if siblings else strangers
        if not len(examples):
            return self._without_examples(live)
        weights = np.ones(len(examples))
        weights[: len(siblings)] = _SIBLING_WEIGHT
        turns, output, growth = np.average(examples, axis=0, weights=weights)
        return Remaining(turns, output, growth, _quantile(examples[:, 2], weights, _HIGH))

    @staticmethod
    def _without_examples(live: _Live | None) -> Remaining:
        if live is None or not live.outputs:
            return Remaining(1.0, 0.0, 0.0, 0.0)
        grown = live.contexts[-1] - live.contexts[0] + live.outputs[-1]
        return Remaining(len(live.outputs), sum(live.outputs), grown, 2.0 * grown)


def _quantile(values: np.ndarray, weights: np.ndarray, quantile: float) -> float:
    """The smallest value that at least this share of the weight does not exceed."""
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(below, quantile * below[-1])])
