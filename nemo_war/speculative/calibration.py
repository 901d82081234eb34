"""How probable it is that a drafted token is accepted, learned from what came instead.

Tables of (successes, trials):

* `trust`: how often the next token of a *candidate* - one earlier place whose context
  equals the request's - is the one that is sampled; by kind of place, matched length
  and age in policy epochs. The odds are the candidate's weight in the vote.
* `detail` and its coarser margins `outline` and `sketch`: how often the token that
  the vote put into the *draft* is sampled, given that the draft was right so far. The
  margins also go by the request's *form*, how its own last drafts began: a model that has
  left the text it was copying is soon known by it.

A cell with few trials leans on the coarser one behind it (additive smoothing, as in
interpolated n-gram models). Cells forget: at `LIMIT` trials both numbers are halved.

Accepted means equal to the sampled token: with exact rejection sampling a drafted
token of probability p is accepted with probability p, and the token sampled in its
place when it is not is another one. So outcomes are known without asking the verifier,
and even of draft tokens that were never verified.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_war.kernel import kernel
from nemo_war.snapshot import State

# Kinds of places: the trajectory's own tokens, a sibling's, another's. GIVEN is added for tokens that
# no model sampled (prompts, tool results), RECOVERING while a place is followed past a token that differed.
OWN, SIBLING, OTHER, GIVEN, RECOVERING = 0, 1, 2, 3, 6
KINDS = 12
MAX_MATCH = 64
LENGTHS = 11
AGES = 4
AGREEMENTS, SUPPORTS, PLACES, FORMS = 6, 4, 6, 4
FULL_FORM = 256  # every draft so far began right
FIRST_FORM = 128  # of a trajectory that was never drafted for
DECILES = 10
LIMIT = 2000.0


def _steps(size: int, starts: tuple[int, ...]) -> np.ndarray:
    """int32[size]: for each number which of the ranges that start at `starts` it is in."""
    return (np.searchsorted(np.array(starts), np.arange(size), side="right") - 1).astype(np.int32)


LENGTH_OF = _steps(MAX_MATCH + 1, (0, 1, 2, 3, 4, 6, 9, 13, 21, 33, 64))
COARSE_OF = np.array([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5], np.int32)
COARSE = 6
PLACE_OF = _steps(65, (0, 1, 2, 4, 8, 16))
SUPPORT_OF = _steps(65, (0, 2, 3, 5))
# What to believe before there are outcomes, rounded from half of the tau-bench tasks: trust by matched
# length (after a wrong token the same place is soon right again), acceptance by agreement.
PRIOR_TRUST = np.array([0.12, 0.17, 0.4, 0.5, 0.65, 0.78, 0.85, 0.88, 0.92, 0.95, 0.98])
PRIOR_RECOVERING = np.array([0.1, 0.5, 0.7, 0.7, 0.75, 0.8, 0.8, 0.85, 0.85, 0.9, 0.9])
PRIOR_ACCEPTANCE = np.array([0.15, 0.28, 0.42, 0.5, 0.57, 0.85], np.float32)


class Calibration(NamedTuple):
    """Tables float32[..., 2] of successes and trials, changed in place.

    Attributes:
        trust: float32[KINDS, LENGTHS, AGES, 2].
        detail: float32[KINDS * COARSE * AGREEMENTS * SUPPORTS * PLACES, 2].
        outline: float32[KINDS * LENGTHS * AGREEMENTS * FORMS, 2].
        sketch: float32[AGREEMENTS * PLACES * FORMS, 2].
        reliability: float64[DECILES, 3]: of draft tokens by predicted probability: sum of
            the predictions, successes, trials. Never forgets; a metric only.
    """

    trust: np.ndarray
    detail: np.ndarray
    outline: np.ndarray
    sketch: np.ndarray
    reliability: np.ndarray


def new_calibration() -> Calibration:
    """Tables that believe in long matches, and in the own trajectory and siblings more than in others."""
    trust = np.zeros((KINDS, LENGTHS, AGES, 2), np.float32)
    for kind in range(KINDS):
        prior = PRIOR_RECOVERING if kind >= RECOVERING else PRIOR_TRUST
        doubt = (0.9 if kind % 3 == OTHER else 1.0) * (0.9 if kind % RECOVERING >= GIVEN else 1.0)
        trust[kind, :, :, 0] = 4 * doubt * prior[:, None]
    trust[..., 1] = 4
    return Calibration(
        trust=trust,
        detail=np.zeros((KINDS * COARSE * AGREEMENTS * SUPPORTS * PLACES, 2), np.float32),
        outline=np.zeros((KINDS * LENGTHS * AGREEMENTS * FORMS, 2), np.float32),
        sketch=np.zeros((AGREEMENTS * PLACES * FORMS, 2), np.float32),
        reliability=np.zeros((DECILES, 3), np.float64),
    )


def soften(calibration: Calibration) -> None:
    """The policy changed: keep the rates but let new outcomes count for more."""
    for table in (calibration.trust, calibration.detail, calibration.outline, calibration.sketch):
        trials = table[..., 1:]
        table *= np.where(trials > LIMIT / 8, LIMIT / 8 / np.maximum(trials, 1), 1).astype(np.float32)


def reliability(calibration: Calibration) -> list[tuple[float, float, int]]:
    """(mean prediction, observed rate, draft tokens) for each decile of predictions that occurred."""
    return [(float(p / n), float(hits / n), int(n)) for p, hits, n in calibration.reliability if n > 0]


def state(calibration: Calibration) -> State:
    """The tables as they are now."""
    return State({name: table.copy() for name, table in calibration._asdict().items()})


def restore(calibration: Calibration, state: State) -> None:
    """Go on with the tables of a state.

    Raises:
        ValueError: they are not such tables, and nothing was changed.
    """
    found = Calibration(*(state.array(name, table) for name, table in calibration._asdict().items()))
    if not (found.trust[..., 1] > 0).all():
        raise ValueError("trust has a cell without trials")  # kernels divide by them
    for name, table in found._asdict().items():
        successes, trials = table[..., -2], table[..., -1]
        if not (successes <= trials).all():
            raise ValueError(f"{name} has more successes than trials")
        if name != "reliability" and not (trials <= LIMIT + 1).all():
            raise ValueError(f"{name} has more trials than are counted")
    for table, values in zip(calibration, found, strict=True):
        table[...] = values


@kernel
def record(cell, success):
    """Count one outcome in a cell float32[2]."""
    if cell[1] >= LIMIT:
        cell[0] *= np.float32(0.5)
        cell[1] *= np.float32(0.5)
    cell[1] += np.float32(1)
    if success:
        cell[0] += np.float32(1)


@kernel
def weight_of(trust, kind, length, age):
    """Vote of a candidate: the fourth power of the odds that its next token is right.

    Places that repeat each other are no independent witnesses, so that a better one must not
    be outvoted by several worse ones. On NeMo-Gym rollouts plain odds cost 3 % of goodput,
    the second power 1 %, and the sixth was no better than the fourth.
    """
    cell = trust[kind, LENGTH_OF[length], age]
    rate = cell[0] / cell[1]
    squared = (rate / (np.float32(1.01) - rate)) ** 2
    return squared * squared


@kernel
def cell_of(kind, length, agreement, support, place, form):
    """The cells of `detail`, `outline` and `sketch` a draft token belongs to, packed into one int64.

    Args:
        kind: of the strongest candidate behind the token.
        length: that candidate's match, the draft before the token included; at most MAX_MATCH.
        agreement: share of the vote the token got, in [0, 1].
        support: number of candidates behind it.
        place: its position in the draft.
        form: how the request's last drafts began, in [0, FULL_FORM]; see `form_after`.
    """
    doubt = 1 - agreement
    level = (
        0
        if doubt > 0.6
        else 1
        if doubt > 0.4
        else 2
        if doubt > 0.2
        else 3
        if doubt > 0.07
        else 4
        if doubt > 0.02
        else 5
    )
    bucket = LENGTH_OF[min(length, MAX_MATCH)]
    support, place = SUPPORT_OF[min(support, 64)], PLACE_OF[min(place, 64)]
    detail = (
        ((kind * COARSE + COARSE_OF[bucket]) * AGREEMENTS + level) * SUPPORTS + support
    ) * PLACES + place
    form = min(form * FORMS // FULL_FORM, FORMS - 1)
    outline = ((kind * LENGTHS + bucket) * AGREEMENTS + level) * FORMS + form
    sketch = (level * PLACES + place) * FORMS + form
    return (np.int64(detail) << 24) | (np.int64(outline) << 8) | np.int64(sketch)


@kernel
def form_after(form, right):
    """The form when one more draft began right or not: a moving average over about four drafts."""
    return form + ((FULL_FORM if right else 0) - form) // 4


@kernel
def acceptance(calibration, cell):
    """Probability that a draft token of this cell is accepted if those before it are."""
    rate = _lean(calibration.sketch[cell & 255], PRIOR_ACCEPTANCE[(cell & 255) // (PLACES * FORMS)], 2)
    rate = _lean(calibration.outline[(cell >> 8) & 65535], rate, 8)
    return _lean(calibration.detail[cell >> 24], rate, 16)


@kernel
def _lean(cell, rate, weight):
    return (cell[0] + np.float32(weight) * rate) / (cell[1] + np.float32(weight))


@kernel
def learn(calibration, cell, predicted, success):
    """Count the outcome of one draft token that was predicted with probability `predicted`."""
    record(calibration.sketch[cell & 255], success)
    record(calibration.outline[(cell >> 8) & 65535], success)
    record(calibration.detail[cell >> 24], success)
    row = calibration.reliability[min(int(predicted * DECILES), DECILES - 1)]
    row[0] += predicted
    row[1] += success
    row[2] += 1
