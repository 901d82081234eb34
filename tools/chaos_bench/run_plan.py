"""Which faults befall whole runs, and when: drawn beforehand, from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

Damage = Literal["flip", "cut", "delete", "swap", "add"]
"""One bit, the rest of a file, a file, another checkpoint's in its place, one beside the others."""

SIGNALS = ("sigterm_run", "sigint_run", "kill_run")
DISKS = ("full_disk_run", "full_disk_checkpoints")
CORRUPT = "corrupt_checkpoint"
RUN_KINDS = (*SIGNALS, *DISKS, CORRUPT)
STEPS = 4
"""Of a run, so that there are some before a fault and behind it."""
_DAMAGES: tuple[Damage, ...] = ("flip", "cut", "delete", "swap", "add")
_STARTING = ("this run's folder is", "vLLM replicas: 0/")
"""What a run says while it starts."""


@dataclass(frozen=True, slots=True)
class Moment:
    """So many seconds after a run has said something."""

    said: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class RunFault:
    """One of a plan.

    Attributes:
        number: from 0.
        kind: one of `RUN_KINDS`.
        moment: when it happens; damage is done to what is there when the run was stopped then.
        end: when a full disk has room again; None: not before the run's end.
        damage: to a checkpoint; None for other kinds.
        seed: of what is left to chance when it happens.
    """

    number: int
    kind: str
    moment: Moment
    end: Moment | None
    damage: Damage | None
    seed: int


def drawn(kinds: tuple[str, ...], faults: int, seed: int) -> tuple[RunFault, ...]:
    """A plan. Every kind comes before any comes again, and so does every damage."""
    draw, deck, damages, made = Random(f"runs {seed}"), [], [], []
    for number in range(faults):
        deck = deck or draw.sample(kinds, len(kinds))
        kind, damage, end = deck.pop(), None, None
        if kind == CORRUPT:
            damages = damages or draw.sample(_DAMAGES, len(_DAMAGES))
            damage = damages.pop()
            moment = _saved(2, STEPS - 1, draw)  # there has to be one before
        elif kind in DISKS:
            moment = _saved(1, STEPS - 2, draw) if draw.random() < 0.7 else Moment("live rollouts: 0/", 0.0)
            again = (
                f"step {STEPS - 1}/{STEPS}: live rollouts: 0/" if kind == DISKS[0] else "could not be written"
            )
            end = Moment(again, draw.uniform(0, 0.1)) if draw.random() < 0.5 else None
        else:
            moment = _anywhere(draw)
        made.append(RunFault(number, kind, moment, end, damage, draw.randrange(2**32)))
    return tuple(made)


def _anywhere(draw: Random) -> Moment:
    """While a run starts, or in any part of any step but the last, which might be over too soon."""
    if draw.random() < 0.25:
        return Moment(draw.choice(_STARTING), draw.uniform(0, 3))
    step = f"step {draw.randint(1, STEPS - 1)}/{STEPS}: "
    return Moment(step + draw.choice(("live rollouts: 0/", "updating", "saved as")), draw.uniform(0, 0.3))


def _saved(first: int, last: int, draw: Random) -> Moment:
    return Moment(f"step {draw.randint(first, last)}/{STEPS}: saved as", draw.uniform(0, 0.1))
