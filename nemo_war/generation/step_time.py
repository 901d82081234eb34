"""How long an engine step takes: one model for pricing, placement and simulation.

    T = base + a·requests + b·tokens + c·context + [drafts]·(s + r·requests + d·drafts) + hinges

Tokens are all that a step computes: one per decoding request, its draft tokens, and
prefill. A draft token costs more than a token of a prompt, as it is sampled from, and
rejection sampling costs each request of the batch something, whether it has a draft or
not (on the CPU more than its own token). The hinges let the price of a token rise with
the step's size, as a processor goes from memory-bound to compute-bound, and that of a
sampled token likewise. No coefficient is negative, so that no marginal cost is.

The fit is online: least squares on relative errors with exponential forgetting, drawn
towards a prior, under the sign constraint. The form is
that of EfficientRollout (arXiv 2606.18967) and SmartSpec (arXiv 2406.14066); they fit
it to a profiling run instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nemo_war.config import StepTimePrior
from nemo_war.snapshot import State

HINGES = (64, 512)
"""Tokens per step from which another one costs more: where accelerators leave the flat part."""
SAMPLED_HINGE = 16
"""Sampled tokens (requests and drafts) from which another one costs more. Without it a CPU's step of 16
requests with drafts is believed 10 % shorter than it is, next to the same step without."""

_FORGETTING = 0.995
"""Per step: a memory of some 200 steps, seconds of decoding, to follow a change of load or clock."""
_NOISE = 0.1
"""Relative spread of step times at equal load, as seen on the CPU; how much a prior counts against data."""
_SPREAD = 10.0
"""How many times larger than the prior a coefficient may well be: GPUs and CPUs differ by that and more."""
_LEAST_SPREAD_MS = np.array([30.0, 3.0, 1.0, 1.0, 1.0, 1.0, 20.0, 3.0, 3.0, 3.0])
"""Spread where the prior is smaller; a coefficient given as zero could never rise without."""
_EAGER_STEPS, _SOLVE_EVERY = 64, 4
"""Solving costs 0.1 ms of the engine's own thread, and once a belief has formed one step moves it little."""
_LEAST_MS = 0.05
"""No engine step is faster; a clock that did not move must not weigh infinitely."""
_ROUNDING = 1e-9
"""Relative error of a sum of squares that long."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one engine step computes.

    Attributes:
        requests: requests in the batch.
        tokens: tokens computed, draft tokens included.
        context: tokens attended to, summed over the requests.
        drafts: draft tokens among them.
    """

    requests: int
    tokens: int
    context: int = 0
    drafts: int = 0


class StepTimeModel:
    """Step times in milliseconds, learned as steps go by.

    Attributes:
        coefficients: float64[10] ms, in the order of `features`.
        steps: steps learned from.
    """

    def __init__(self, prior: StepTimePrior) -> None:
        """Start from a belief; `prior` counts for as much as a few steps do."""
        start = np.array(
            [
                prior.base, prior.per_request, prior.per_token, 0.0, 0.0, prior.per_kilotoken,
                prior.speculating, prior.speculating_per_request, prior.per_draft_token, 0.0,
            ]
        )  # fmt: skip
        self.coefficients = start
        self.steps = 0
        pull = (_NOISE / np.maximum(_SPREAD * start, _LEAST_SPREAD_MS)) ** 2
        self._prior_gram, self._prior_moment = np.diag(pull), pull * start
        self._gram, self._moment = np.zeros((len(start), len(start))), np.zeros(len(start))

    def predict(self, load: StepLoad) -> float:
        """Expected time of a step, in milliseconds."""
        return float(features(load) @ self.coefficients)

    def with_drafts(self, load: StepLoad, drafts: int) -> np.ndarray:
        """Expected times of a step without drafts when 0, 1, ... draft tokens join it.

        Returns:
            float64[drafts + 1], milliseconds.
        """
        added = np.arange(drafts + 1)
        per_token, hinges = self.coefficients[2] + self.coefficients[8], self.coefficients[3:5]
        speculating = self.coefficients[6] + self.coefficients[7] * load.requests
        times = self.predict(load) + per_token * added + speculating * (added > 0)
        for slope, hinge in zip(hinges, HINGES, strict=True):
            times += slope * _more_beyond(hinge, load.tokens, added)
        return times + self.coefficients[9] * _more_beyond(SAMPLED_HINGE, load.requests, added)

    def doubt(self, load: StepLoad, drafts: int) -> float:
        """How uncertain it is what so many draft tokens add to a step without any.

        A job that always drafts, or never does, cannot tell what drafting adds to a step
        from what each request does.

        Returns:
            Standard deviation, in milliseconds.
        """
        with_drafts = StepLoad(load.requests, load.tokens + drafts, load.context, drafts)
        added = features(with_drafts) - features(load)
        return _NOISE * float(np.sqrt(added @ np.linalg.solve(self._gram + self._prior_gram, added)))

    def observe(self, load: StepLoad, milliseconds: float) -> None:
        """Learn from a step that took so long."""
        # Dividing by the measured time makes errors relative, and a step that took far too
        # long (a pause, an idle moment) weigh next to nothing.
        x = features(load) / max(milliseconds, _LEAST_MS)
        self._gram = _FORGETTING * self._gram + np.outer(x, x)
        self._moment = _FORGETTING * self._moment + x
        self.steps += 1
        if self.steps <= _EAGER_STEPS or self.steps % _SOLVE_EVERY == 0:
            self.coefficients = _solve(self._gram + self._prior_gram, self._moment + self._prior_moment)

    def state(self) -> State:
        """What was learned; the prior is the configuration's."""
        return State(
            {
                "coefficients": self.coefficients.copy(),
                "gram": self._gram.copy(),
                "moment": self._moment.copy(),
                "steps": np.array(self.steps, np.int64),
            }
        )

    def restore(self, state: State) -> None:
        """Go on with what a state learned.

        Raises:
            ValueError: it is no state of such a model, and nothing was changed.
        """
        coefficients, moment = (state.array(name, self.coefficients) for name in ("coefficients", "moment"))
        gram = state.array("gram", self._gram)
        steps = state.array("steps", np.array(0, np.int64))
        if not (gram == gram.T).all() or np.linalg.eigvalsh(gram)[0] < -_ROUNDING * gram.trace():
            raise ValueError("gram is no sum of squares")
        self.coefficients, self._gram, self._moment = coefficients, gram, moment
        self.steps = int(steps)


def _more_beyond(hinge: int, present: int, added: np.ndarray) -> np.ndarray:
    """How many of the added tokens lie beyond the hinge."""
    return np.maximum(0, present + added - hinge) - max(0, present - hinge)


def features(load: StepLoad) -> np.ndarray:
    """The model's inputs, float64[10]; the context in thousands of tokens."""
    beyond = [max(0, load.tokens - hinge) for hinge in HINGES]
    speculating = load.drafts > 0
    sampled_beyond = max(0, load.requests + load.drafts - SAMPLED_HINGE)
    verification = [speculating, speculating * load.requests, load.drafts, sampled_beyond]
    return np.array(
        [1, load.requests, load.tokens, *beyond, load.context / 1000, *verification], dtype=np.float64
    )


def _solve(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """Minimise x·gram·x - 2·moment·x over x >= 0: solve, drop the most negative coefficient, solve again.

    The sets this visits are a subset of an active-set method's; with the prior's pull
    the problem is well conditioned, and nearly always the first or second solution stands.
    """
    free = np.arange(len(moment))
    x = np.zeros(len(moment))
    while len(free):
        solution = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
        if solution.min() >= 0:
            x[free] = solution
            return x
        free = np.delete(free, solution.argmin())
    return x
