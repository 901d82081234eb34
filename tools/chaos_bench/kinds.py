"""The kinds of faults: a table to add to.

A kind is a coroutine that does something to a victim, which serves at first, and returns when it has
happened. It has been survived when the fleet has noticed and the victim serves again; what lasts is
called off as soon as it was noticed.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from tools.chaos_bench.victim import Moment, Victim

InFlight = Literal["drain", "pause", "abort"]
_ALL: tuple[InFlight, ...] = ("drain", "pause", "abort")
_FREEZING: tuple[InFlight, ...] = ("pause", "abort")
"""Ways to refit in which a replica is told to pause."""
SCHEDULER_SHARE = 3
LATE_S = 4.0
"""How long a transfer of weights takes that is too late."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to go wrong.

    Attributes:
        act: does it.
        share: how often it is drawn, relative to others.
        real: whether it can be done to a real engine, which takes no orders within.
        in_flight: the ways to refit with which it can happen.
        noticed: by what the fleet shows that it noticed: a fence around its victim, or a failed
            exchange of history.
        at_scheduler: whether its victim is the scheduler.
    """

    act: Callable[[Victim], Awaitable[None]]
    share: int = 1
    real: bool = False
    in_flight: tuple[InFlight, ...] = _ALL
    noticed: Literal["fence", "exchange"] = "fence"
    at_scheduler: bool = False


async def _signalled(signum: signal.Signals, moment: Moment, victim: Victim) -> None:
    """A signal from outside, at some moment."""
    victim.slower("pause", "load", "reset", "export", "import")
    if moment == "rejoining":
        await victim.obeys(refuse_reset=1)
    elif moment == "starting":
        await victim.at("turn")
        victim.signal(signal.SIGKILL)
        await victim.fenced()
        victim.order(slow={"start": victim.pace.start_s})
    await victim.at(moment)
    victim.signal(signum)


async def _ordered(orders: dict[str, Any], victim: Victim) -> None:
    """Something within the engine, once or more often."""
    await victim.obeys(**orders)


async def _repeated(order: str, victim: Victim) -> None:
    """Something that may happen again when the replica is given the weights anew."""
    await victim.obeys(**{order: victim.draw.randint(1, 2)})


async def _in_a_step(end: str, victim: Victim) -> None:
    await victim.obeys(**{end: "step", "after": victim.draw.randint(0, 20)})


async def _ill_started(orders: dict[str, Any], victim: Victim) -> None:
    """It dies, and does not start again at the first attempt."""
    victim.order(**orders)
    await victim.at("turn")
    victim.signal(signal.SIGKILL)
    await victim.obeyed()


async def _late(victim: Victim) -> None:
    """A transfer takes longer than it may."""
    victim.order(slow={"load": LATE_S})
    await victim.at("loading")
    victim.strikes()


async def _signalled_at_once(signum: signal.Signals, victim: Any) -> None:
    victim.signal(signum)


_MOMENTS: tuple[Moment, ...] = ("turn", "quieting", "loading", "resetting", "exchanging", "rejoining")

KINDS: dict[str, Kind] = {
    **{f"kill_{at}": Kind(partial(_signalled, signal.SIGKILL, at), 2, real=True) for at in _MOMENTS},
    "kill_starting": Kind(partial(_signalled, signal.SIGKILL, "starting"), 2, real=True),
    **{f"stop_{at}": Kind(partial(_signalled, signal.SIGSTOP, at), real=True) for at in _MOMENTS},
    **{f"{end}_step": Kind(partial(_in_a_step, f"{end}_at")) for end in ("die", "freeze", "hang", "break")},
    **{
        f"{end}_{place}": Kind(partial(_ordered, {f"{end}_at": place}))
        for end in ("die", "freeze", "hang", "break")
        for place in ("load", "reset", "export", "import")
    },
    "hang_pause": Kind(partial(_ordered, {"hang_at": "pause"}), in_flight=_FREEZING),
    "break_pause": Kind(partial(_ordered, {"break_at": "pause"}), in_flight=_FREEZING),
    "fail_pause": Kind(partial(_repeated, "fail_pause"), in_flight=_FREEZING),
    "fail_resume": Kind(partial(_repeated, "fail_resume"), in_flight=_FREEZING),
    "hang_epoch": Kind(partial(_ordered, {"hang_at": "epoch"})),
    "fail_epoch": Kind(partial(_repeated, "fail_epoch"), 2),
    "fail_load": Kind(partial(_repeated, "fail_load"), 4, real=True),
    "wrong_digest": Kind(partial(_repeated, "wrong_digest"), 4, real=True),
    "refuse_reset": Kind(partial(_repeated, "refuse_reset"), 4, real=True),
    "fail_reset": Kind(partial(_repeated, "fail_reset"), 2),
    "fail_export": Kind(partial(_repeated, "fail_export"), 6, noticed="exchange"),
    "fail_import": Kind(partial(_repeated, "fail_import"), 6, noticed="exchange"),
    "damage_import": Kind(partial(_repeated, "damage_import"), 6, real=True, noticed="exchange"),
    "late_load": Kind(_late),
    "fail_start": Kind(partial(_ill_started, {"fail_start": 1})),
    "break_start": Kind(partial(_ill_started, {"break_at": "start"})),
    "die_start": Kind(partial(_ill_started, {"die_at": "start"})),
    "kill_scheduler": Kind(
        partial(_signalled_at_once, signal.SIGKILL), SCHEDULER_SHARE, real=True, at_scheduler=True
    ),
    "stop_scheduler": Kind(
        partial(_signalled_at_once, signal.SIGSTOP), SCHEDULER_SHARE, real=True, at_scheduler=True
    ),
}
"""All kinds by name. `kill` and `stop` are signals from outside. Within the engine `die` and `freeze` are the
same, `hang` and `break` leave the actor alive, and it says so in the latter case; `fail` is one exception."""


def possible(real: bool, in_flight: InFlight) -> dict[str, Kind]:
    """The kinds that can be done to such engines."""
    return {
        name: kind for name, kind in KINDS.items() if in_flight in kind.in_flight and (kind.real or not real)
    }
