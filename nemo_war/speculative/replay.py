"""Teacher forcing: what drafting would have done for trajectories that are on record.

Walk each recorded response, draft at each place, accept the longest prefix that equals
what was recorded, go on behind it. For a draft that is a point mass under exact
rejection sampling this estimates acceptance without bias, at the temperature of the
recording. Attempts are replayed one after the other, though siblings run at the same
time: a live one sees less of its siblings than is assumed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_war.speculative.history import SuffixHistory
from nemo_war.speculative.workload import Recorded

COSTS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
THRESHOLDS = (0.02, 0.03, 0.05, 0.08, 0.12, 0.18, 0.25, 0.33, 0.42, 0.52, 0.62)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The steps of one response.

    Attributes:
        group: of the trajectory.
        epoch: of the trajectory.
        steps: engine steps.
        drafted: draft tokens verified.
        tokens: tokens committed; the first of a response comes out of the prefill and is not one of them.
        verified: int64[max_draft], how often a draft reached each place with all before it accepted.
        accepted: int64[max_draft], how often the token there was accepted.
    """

    group: str
    epoch: int
    steps: int
    drafted: int
    tokens: int
    verified: np.ndarray
    accepted: np.ndarray


def accepted_length(draft: np.ndarray, rest: np.ndarray) -> int:
    """How many leading tokens agree."""
    size = min(len(draft), len(rest))
    differ = np.flatnonzero(draft[:size] != rest[:size])
    return int(differ[0]) if len(differ) else size


class Replay:
    """A history that recorded trajectories go through, one after the other.

    Attributes:
        history: what it holds, and how well its predictions hold.
    """

    def __init__(
        self, threshold: float, max_draft: int, max_tokens: int = 4_000_000, keep_history: bool = True
    ) -> None:
        """Start from nothing.

        Args:
            threshold: each draft goes as far as its survival probability reaches this, the price.
            max_draft: longest draft.
            max_tokens: size of the history.
            keep_history: False: every trajectory has only itself to draft from.
        """
        self.history = SuffixHistory(max_tokens=max_tokens, max_draft=max_draft, max_live=2)
        self._threshold, self._keep = threshold, keep_history
        self._budget, self._count = np.full(1, max_draft, np.int32), np.ones(1, np.int32)
        self._epoch = 0

    def run(self, recorded: Sequence[Recorded], on_done: Callable[[], None] = lambda: None) -> list[Replayed]:
        """Replay in this order; `on_done` is told of each trajectory."""
        replayed = []
        for each in recorded:
            replayed += self.trajectory(each)
            on_done()
        return replayed

    def trajectory(self, recorded: Recorded) -> list[Replayed]:
        """Replay one trajectory, turn by turn."""
        if recorded.epoch != self._epoch:
            self._epoch = recorded.epoch
            self.history.advance_epoch(recorded.epoch)
        if not self._keep:
            self.history.clear()
        context, replayed = np.zeros(0, np.int32), []
        for prompt, response in recorded.turns:
            context = np.concatenate([context, prompt])
            replayed.append(self.turn(recorded, context, response))
            context = np.concatenate([context, response])
        return replayed

    def turn(self, recorded: Recorded, context: np.ndarray, response: np.ndarray) -> Replayed:
        """Replay one turn.

        Args:
            recorded: whose turn it is.
            context: int32[n], the whole text before the response.
            response: int32[m].
        """
        history = self.history
        slot = np.array(
            [history.begin(recorded.trajectory, recorded.group, recorded.epoch, context)], np.int32
        )
        verified, accepted = np.zeros((2, int(self._budget[0])), np.int64)
        steps = drafted = 0
        self._count[0] = at = 1  # the first token comes out of the prefill
        history.extend(slot, response[None, :1], self._count)
        while at < len(response):
            drafts = history.draft(slot, self._budget, recorded.epoch)
            size = int((drafts.survival[0] >= self._threshold).sum())
            right = accepted_length(drafts.tokens[0, :size], response[at:])
            accepted[:right] += 1
            verified[: min(right + 1, size, len(response) - at)] += 1  # what lies behind the end is not known
            self._count[0] = min(right + 1, len(response) - at)
            steps, drafted = steps + 1, drafted + size
            history.extend(slot, response[None, at : at + self._count[0]], self._count)
            at += int(self._count[0])
        history.end(int(slot[0]))
        return Replayed(
            recorded.group, recorded.epoch, steps, drafted, max(0, len(response) - 1), verified, accepted
        )


def goodput(steps: float, drafted: float, tokens: float, cost: float) -> float:
    """Tokens per step's time, a draft token costing `cost` of a step: A / (1 + c D)."""
    return tokens / (steps + cost * drafted) if steps else 0.0
