"""What a draft token is worth: the slots of all requests in a step compete.

A draft token accepted with probability p commits p tokens and costs the time it adds
to the step. With W tokens committed anyway and T(n) the step's time with n draft
tokens, the best set maximises goodput

    G(n) = (W + sum of the n largest p) / T(n),

which keeps token i while p_i >= dT/dn · G: the *price*. At low load the memory-bound
step makes dT/dn nearly zero and almost any guess is worth it; near saturation the
price passes 1 and nothing is. There is no batch threshold. The survival probability
falls along a draft, so the n best tokens are always whole beginnings of drafts.

Goodput as the objective is SmartSpec's (arXiv 2406.14066), the competition of all
slots of the batch that of vLLM's adaptive verification.
"""

from __future__ import annotations

import numpy as np

from nemo_war.generation.step_time import StepLoad, StepTimeModel

_MARGIN_ON, _MARGIN_OFF = 1.05, 1.1
"""Goodput that drafting must promise, against none, while it is on and while it is off. The best of many
guesses promises more than it keeps, a step that is longer for some is longer for all, those without a draft
included, and a model's error of a few percent must not switch it at every step."""
_CRITICAL = 2.0
"""Worth of a critical request's tokens: the step waits for it, so its time counts for more than its share."""
_PROBE_EVERY = 256
"""Steps without drafts after which one step drafts all the same, to correct a cost that is wrong."""
_PROBE_TOKENS = 8
"""Draft tokens of such a step, at most."""


class DraftPricer:
    """Cuts drafts to what they are worth at this step's load.

    Attributes:
        price: acceptance probability that the last draft token had to have; 0 at first.
    """

    def __init__(self, model: StepTimeModel, max_running: int | None = None) -> None:
        """Price by a step-time model, which somebody else keeps up to date.

        Args:
            model: step times.
            max_running: forced load rule for ablations: no drafts above so many running
                requests, and no price below.
        """
        self._model = model
        self._max_running = max_running
        self._drafting = True
        self._idle_steps = 0
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
        values = np.where(offered, survival, 0.0) * worth[:, None]
        gains = -np.sort(-values[offered])
        count = self._best(load, worth.sum(), gains)
        if not count:
            return np.zeros_like(lengths)
        # Ties beyond `count` are of equal worth; taking them all keeps the cut a plain comparison.
        return (offered & (values >= gains[count - 1])).sum(axis=1).astype(np.int32)

    def _best(self, load: StepLoad, base: float, gains: np.ndarray) -> int:
        """Number of draft tokens with the highest goodput, hysteresis and probes applied."""
        times = self._model.with_drafts(load, len(gains))
        goodput = (base + np.concatenate([[0.0], np.cumsum(gains)])) / times
        best = int(np.argmax(goodput))
        if best + 1 < len(times):
            self.price = float((times[best + 1] - times[best]) * goodput[best])
        self._drafting = (
            goodput[best] >= goodput[0] * (_MARGIN_ON if self._drafting else _MARGIN_OFF) and best > 0
        )
        if self._drafting:
            self._idle_steps = 0
            return best
        self._idle_steps += 1
        if self._idle_steps < _PROBE_EVERY or not len(gains):
            return 0
        self._idle_steps = 0
        return min(len(gains), _PROBE_TOKENS)
