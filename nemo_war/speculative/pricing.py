"""What a draft token is worth: the slots of all requests in a step compete.

A draft token accepted with probability p commits p tokens and costs the time it adds
to the step. With W tokens committed anyway and T(n) the step's time with n draft
tokens, the best set maximises goodput

    G(n) = (W + sum of the n largest p) / T(n),

which keeps token i while p_i >= dT/dn · G: the *price*. At low load the memory-bound
step makes dT/dn nearly zero and almost any guess is worth it; near saturation the
price passes 1 and nothing is. There is no batch threshold. The survival probability
falls along a draft, so the n best tokens are always whole beginnings of drafts.

Two corrections keep it honest. Of many guesses the best promise more than they keep, so
promises are discounted by how recent ones were kept. And who only ever drafts cannot
tell what drafting costs from what a request costs: while that is in doubt by more than
the decision can bear, every second step does the other thing.

Goodput as the objective is SmartSpec's (arXiv 2406.14066), the competition of all
slots of the batch that of vLLM's adaptive verification.
"""

from __future__ import annotations

import numpy as np

from nemo_war.generation.step_time import StepLoad, StepTimeModel
from nemo_war.snapshot import State

_MARGIN_ON, _MARGIN_OFF = 1.05, 1.1
"""Goodput that drafting must promise, against none, while it is on and while it is off. A step that is longer
for some is longer for all, those without a draft included, and a model's error of a few percent must not
switch it at every step."""
_CRITICAL = 2.0
"""Worth of a critical request's tokens: the step waits for it, so its time counts for more than its share."""
_TRUST_MEMORY = 0.98
"""Per step with drafts: the keeping of promises is judged on the last 50."""
_TRUST_PRIOR = 30.0
"""Accepted tokens' worth of trust given at the start."""
DOUBT = 2.0
"""Standard deviations of the cost of drafting within which the other decision may be the better one."""


class DraftPricer:
    """Cuts drafts to what they are worth at this step's load.

    Attributes:
        price: acceptance probability that the last draft token had to have; 0 at first.
    """

    def __init__(self, model: StepTimeModel, max_running: int | None = None, doubt: float = DOUBT) -> None:
        """Price by a step-time model, which somebody else keeps up to date.

        Args:
            model: step times.
            max_running: forced load rule for ablations: no drafts above so many running
                requests, and no price below.
            doubt: how many standard deviations of the model's belief leave room for a probe; 0 for none.
        """
        self._model = model
        self._doubt = doubt
        self._max_running = max_running
        self._drafting = True
        self._drafted = False
        self._chosen, self._promise = 0, 0.0
        self._promised, self._kept = _TRUST_PRIOR, _TRUST_PRIOR
        self.price = 0.0

    def wants(self, running: int) -> bool:
        """Whether drafts can be worth making at all; spares the drafter its work where not."""
        return self._max_running is None or running <= self._max_running

    def choose(
        self, load: StepLoad, survival: np.ndarray, lengths: np.ndarray, critical: np.ndarray
    ) -> np.ndarray:
        """How much of each draft to verify.

        Args:
            load: the step without drafts.
            survival: float32[B, K], probability that a draft token and all before it are
                accepted; not increasing along K.
            lengths: int32[B], tokens of each draft.
            critical: bool[B].

        Returns:
            int32[B], tokens of each draft that are worth verifying.
        """
        if self._max_running is not None:
            return lengths
        worth = np.where(critical, _CRITICAL, 1.0)
        offered = np.arange(survival.shape[1]) < lengths[:, None]
        values = np.where(offered, survival * self.trust, 0.0) * worth[:, None]
        gains = -np.sort(-values[offered])
        count = self._best(load, worth.sum(), gains)
        # Ties beyond `count` are of equal worth; taking them all keeps the cut a plain comparison.
        chosen = offered & (values >= (gains[count - 1] if count else np.inf))
        self._chosen, self._promise = int(chosen.sum()), float(survival[chosen].sum())
        return chosen.sum(axis=1).astype(np.int32)

    @property
    def trust(self) -> float:
        """Accepted tokens per promised one: the best of many guesses promise more than they keep."""
        return min(1.0, self._kept / self._promised)

    def settle(self, verified: int, accepted: int) -> None:
        """Tell what became of the last choice; one that was not verified as it was counts for nothing.

        Args:
            verified: draft tokens that the step verified.
            accepted: those of them that it accepted.
        """
        if not verified or verified != self._chosen:
            return
        self._promised = _TRUST_MEMORY * self._promised + self._promise
        self._kept = _TRUST_MEMORY * self._kept + accepted

    def state(self) -> State:
        """What was learned: how promises are kept, and whether drafting is on."""
        return State(
            {
                "promises": np.array([self._promised, self._kept]),
                "drafting": np.array(self._drafting, np.int64),
            }
        )

    def restore(self, state: State) -> None:
        """Go on with what a state learned.

        Raises:
            ValueError: it is no state of a pricer, and nothing was changed.
        """
        promised, kept = state.array("promises", np.zeros(2)).tolist()
        drafting = bool(state.array("drafting", np.array(0, np.int64), most=1))
        if not promised:
            raise ValueError("promises has none made")
        self._promised, self._kept, self._drafting = promised, kept, drafting

    def _best(self, load: StepLoad, base: float, gains: np.ndarray) -> int:
        """Number of draft tokens with the highest goodput, hysteresis and probes applied."""
        if not len(gains):
            return 0
        times = self._model.with_drafts(load, len(gains))
        goodput = (base + np.concatenate([[0.0], np.cumsum(gains)])) / times
        best = 1 + int(np.argmax(goodput[1:]))
        gain = goodput[best] / goodput[0]
        self._drafting = bool(gain >= (_MARGIN_ON if self._drafting else _MARGIN_OFF))
        count = best if self._drafting else 0
        if count + 1 < len(times):
            self.price = float((times[count + 1] - times[count]) * goodput[count])
        if self._drafted == self._drafting and self._in_doubt(load, best, gain, times[best]):
            count = best - count
        self._drafted = count > 0
        return count

    def _in_doubt(self, load: StepLoad, drafts: int, gain: float, milliseconds: float) -> bool:
        """Whether drafting may cost so much less, or more, that the other decision would be right.

        A step that does the other thing finds out. Without such, a job that always drafts
        (or never does) cannot tell what drafting costs from what a request does.
        """
        swing = 1 + self._doubt * self._model.doubt(load, drafts) / milliseconds
        return gain < swing if self._drafting else gain * swing > _MARGIN_OFF
