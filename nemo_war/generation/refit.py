"""RefitCycle: the weights of a fleet change, and nothing of the old policy is served.

The fleet has a phase, and each replica a stage. At a bar all that take part in the refit
wait for each other, and the fleet goes on with them; the last bar raises the epoch. A
replica that rejoins a serving fleet waits for nobody:

    SERVING ─begin▶ QUIETING ────────────▶ UPDATING ──────────────▶ RESETTING ─────────────▶ SERVING
                       └──────────────────────┴────────────────────────┴─fence▶ FAILED

    SERVING ─begin▶ QUIETING ─quiet▶ QUIET ┃ UPDATING ─updated▶ UPDATED ┃ RESETTING ─reset▶ FRESH ┃ SERVING
                       ▲                        ▲
                       ├─begin─ FENCED ─rejoin──┘        any stage ─fence▶ FENCED
                       └─begin─ UPDATING or RESETTING of one that rejoins

The machine is pure: the shell around it awaits replicas and reports what they said;
the clock is injected. Three rules are kept here and nowhere else:

* no turn is admitted outside `SERVING`, nor to a replica that does not serve;
* the policy epoch rises only when every replica that will serve under it loaded the same
  bytes and itself said that it reset its caches. One that joins later did so, too;
* `FAILED` is final. A fleet of which one part has new weights and the other old ones,
  or stale KV, must not serve on by itself; the step fails and says why.

The shell promises one thing: what it reports was asked for in the stage the replica is in.
Before a refit or a rejoin it stops whatever it had asked of the replica until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Phase(StrEnum):
    """Where the fleet stands."""

    SERVING = "serving"
    QUIETING = "quieting"
    UPDATING = "updating"
    RESETTING = "resetting"
    FAILED = "failed"


class Stage(StrEnum):
    """Where a replica stands."""

    SERVING = "serving"  # has the fleet's epoch; serves whenever the fleet does
    QUIETING = "quieting"  # its turns finish, freeze or are aborted
    QUIET = "quiet"
    UPDATING = "updating"  # loads weights
    UPDATED = "updated"
    RESETTING = "resetting"  # makes the KV of the old weights unreachable
    FRESH = "fresh"  # new weights and no old KV; waits for the others
    FENCED = "fenced"  # may not serve: it failed, was late, died or is stale


_PHASES = {
    Phase.SERVING: {Phase.QUIETING},
    Phase.QUIETING: {Phase.UPDATING, Phase.FAILED},
    Phase.UPDATING: {Phase.RESETTING, Phase.FAILED},
    Phase.RESETTING: {Phase.SERVING, Phase.FAILED},
    Phase.FAILED: set(),
}
"""Every transition of a fleet. None leads out of `FAILED`, and `SERVING` cannot fail: nothing is at stake."""

_STAGES = {
    Stage.SERVING: {Stage.QUIETING, Stage.FENCED},
    Stage.QUIETING: {Stage.QUIET, Stage.FENCED},
    Stage.QUIET: {Stage.UPDATING, Stage.FENCED},
    Stage.UPDATING: {Stage.UPDATED, Stage.QUIETING, Stage.FENCED},
    Stage.UPDATED: {Stage.RESETTING, Stage.FENCED},
    Stage.RESETTING: {Stage.FRESH, Stage.QUIETING, Stage.FENCED},
    Stage.FRESH: {Stage.SERVING, Stage.FENCED},
    Stage.FENCED: {Stage.QUIETING, Stage.UPDATING},
}
"""Every transition of a replica. Nothing leads to `SERVING` but from `FRESH`."""

_REPORTED = {
    Stage.QUIETING: Stage.QUIET,
    Stage.UPDATING: Stage.UPDATED,
    Stage.RESETTING: Stage.FRESH,
}
"""The stages in which a replica is waited for, and where its report takes it."""

_ONWARD = {
    Stage.QUIET: Stage.UPDATING,
    Stage.UPDATED: Stage.RESETTING,
    Stage.FRESH: Stage.SERVING,
}
"""Where those that reported go on to; the fleet's phase is called the same."""


class RefitError(Exception):
    """A refit failed, and the fleet must not serve; or a step was asked for that does not exist."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One step of a replica or of the fleet.

    Attributes:
        replica: None for the fleet.
        before, after: phases of the fleet, or stages of the replica.
        epoch: the fleet's policy epoch, after the step.
        reason: of fences and failures; empty otherwise.
    """

    replica: int | None
    before: Phase | Stage
    after: Phase | Stage
    epoch: int
    reason: str


@dataclass(slots=True)
class _Replica:
    """What is known of one replica.

    Attributes:
        epoch: see `RefitCycle.epoch_of`.
        reason: why it is fenced; empty otherwise.
        deadline: when its stage has taken too long; never, where it is not waited for.
    """

    number: int
    stage: Stage = Stage.SERVING
    epoch: int | None = 0
    reason: str = ""
    deadline: float = float("inf")


class RefitCycle:
    """One fleet's refits, one after another.

    Attributes:
        in_flight: what the shell does to running turns in `QUIETING`; the cycle only keeps it.
        phase: current phase.
        epoch: policy epoch, the count of refits that completed.
        digest: of the weights of this epoch; empty before the first refit if nobody told it.
        reason: why the fleet failed; empty otherwise.
    """

    def __init__(
        self,
        replicas: Iterable[int],
        *,
        in_flight: Literal["drain", "pause", "abort"],
        on_failure: Literal["fail", "continue"] = "fail",
        quiet_timeout_s: float,
        update_timeout_s: float,
        clock: Callable[[], float],
        digest: str = "",
        epoch: int = 0,
        record: Callable[[Transition], None] = lambda transition: None,
    ) -> None:
        """All replicas serve.

        Args:
            replicas: their numbers.
            in_flight: kept for the shell.
            on_failure: what a fenced replica means to a refit: `fail` fails the fleet,
                `continue` lets the others go on while there is one.
            quiet_timeout_s: longest a replica may be `QUIETING`.
            update_timeout_s: longest it may be `UPDATING`, and `RESETTING`.
            clock: seconds.
            digest: of the weights all replicas start with. Without it none can rejoin
                before the first refit, as nobody can say what it would have to load.
            epoch: that they serve under; above 0 where a run goes on that had refits before.
            record: told of every transition once it is made; must not raise, nor act on the cycle.
        """
        self._replicas = {number: _Replica(number, epoch=epoch) for number in sorted(replicas)}
        if not self._replicas:
            raise ValueError("a refit cycle needs at least one replica")
        self.in_flight = in_flight
        self._on_failure = on_failure
        self._timeouts = {
            Stage.QUIETING: quiet_timeout_s,
            Stage.UPDATING: update_timeout_s,
            Stage.RESETTING: update_timeout_s,
        }
        self._clock = clock
        self._record = record
        self.phase = Phase.SERVING
        self.epoch = epoch
        self.digest = digest
        self.reason = ""
        self._wanted = digest  # what is to be loaded: differs from `digest` only while a refit runs or failed

    @property
    def admits(self) -> bool:
        """Whether turns may start."""
        return self.phase is Phase.SERVING

    @property
    def waiting_for(self) -> frozenset[int]:
        """Replicas that have yet to report on what their stage asks of them, rejoining ones included."""
        if self.phase is Phase.FAILED:
            return frozenset()
        return frozenset(each.number for each in self._replicas.values() if each.stage in _REPORTED)

    @property
    def fenced(self) -> dict[int, str]:
        """The replicas that may not serve, and why."""
        return {each.number: each.reason for each in self._replicas.values() if each.stage is Stage.FENCED}

    def stage_of(self, replica: int) -> Stage:
        """Where the replica stands."""
        return self._find(replica).stage

    def serves(self, replica: int) -> bool:
        """Whether turns may start on this replica."""
        return self.admits and self.stage_of(replica) is Stage.SERVING

    def epoch_of(self, replica: int) -> int | None:
        """The epoch whose weights and KV the replica has; a fenced one may have died since.

        None from the moment it is to load others until it serves again: whatever it holds
        then may be of two epochs.
        """
        return self._find(replica).epoch

    def begin(self, digest: str, members: Iterable[int]) -> None:
        """Stop admitting, and start a refit of these replicas; the others will be stale and are fenced.

        Args:
            digest: names the weights that every member must end up with.
            members: they may have served, been fenced or been rejoining until now.

        Raises:
            RefitError: the fleet is not `SERVING`.
            ValueError: no member, one that is not of this fleet, or no digest.
        """
        members = frozenset(members)
        if not members or not members <= self._replicas.keys():
            raise ValueError(
                f"members {sorted(members)}: allowed are one or more of {sorted(self._replicas)}"
            )
        if not digest:
            raise ValueError("an empty digest names no weights")
        self._enter(Phase.QUIETING)
        self._wanted = digest
        for replica in self._replicas.values():
            if replica.number in members:
                self._move(replica, Stage.QUIETING)
            elif replica.stage is not Stage.FENCED:
                self._move(replica, Stage.FENCED, f"replica {replica.number} is not part of the refit")

    def quiet(self, replica: int) -> bool:
        """The replica has no running turn any more, or has frozen them.

        Returns:
            False where the report comes too late to matter: the replica is fenced, or the
            fleet failed. So do `updated` and `reset`.

        Raises:
            RefitError: the replica was asked for something else, or for nothing.
        """
        return self._report(replica, Stage.QUIETING)

    def updated(self, replica: int, digest: str) -> bool:
        """The replica loaded weights of this digest; others than those wanted fence it."""
        wrong = f"loaded weights {digest[:12]}, not {self._wanted[:12]}"
        return self._report(replica, Stage.UPDATING, "" if digest == self._wanted else wrong)

    def reset(self, replica: int, ok: bool) -> bool:
        """The replica answered whether its KV caches were reset; a no fences it."""
        return self._report(replica, Stage.RESETTING, "" if ok else "did not reset its prefix cache")

    def fence(self, replica: int, reason: str) -> bool:
        """The replica may not serve any more; the first reason stands. Its turns are the shell's to end.

        During a refit this fails the fleet, or the others go on without it: see `on_failure`.
        While the fleet serves it goes on serving, even with no replica.

        Args:
            replica: its number.
            reason: what it did, to go on from "replica 3": "died".

        Returns:
            False if it was fenced before.
        """
        found = self._find(replica)
        if found.stage is Stage.FENCED:
            return False
        self._move(found, Stage.FENCED, f"replica {replica} {reason}")
        if self.phase not in (Phase.SERVING, Phase.FAILED):
            self._go_on_without(found)
        return True

    def rejoin(self, replica: int) -> None:
        """A fenced replica is to load this epoch's weights, reset its caches and serve again.

        Turns that still run there the shell has ended. Nobody waits for it, and the epoch
        stays; `updated` and `reset` report on it, and whatever goes wrong fences it again.

        Raises:
            RefitError: the replica is not fenced, the fleet is not `SERVING`, or nobody
                said what the weights are: no refit completed, and no digest was given.
        """
        if self.phase is not Phase.SERVING:
            raise RefitError(f"replica {replica} cannot rejoin while the fleet is {self.phase}")
        if not self.digest:
            raise RefitError(
                f"replica {replica} cannot rejoin: the weights of epoch {self.epoch} have no name"
            )
        self._move(self._find(replica), Stage.UPDATING)

    def check_deadlines(self) -> None:
        """Fence each replica whose stage has taken too long."""
        now = self._clock()
        for number in sorted(self.waiting_for):
            replica = self._replicas[number]
            if now > replica.deadline:
                self.fence(number, f"still {replica.stage} after {self._timeouts[replica.stage]:g} s")

    def _find(self, replica: int) -> _Replica:
        if replica not in self._replicas:
            raise RefitError(f"replica {replica} is not of this fleet")
        return self._replicas[replica]

    def _report(self, replica: int, during: Stage, wrong: str = "") -> bool:
        """Take one replica's report on a stage; False if it comes too late to matter."""
        found = self._find(replica)
        if self.phase is Phase.FAILED or found.stage is Stage.FENCED:
            return False
        if found.stage is not during:
            raise RefitError(f"replica {replica} reported on {during} while it is {found.stage}")
        if wrong:
            return self.fence(replica, wrong)
        self._move(found, _REPORTED[during])
        if self.phase is Phase.SERVING:  # it rejoins
            self._move(found, _ONWARD[found.stage])
        else:
            self._go_on_together()
        return True

    def _go_on_together(self) -> None:
        """Pass the barrier once all that take part have reported; the last one raises the epoch.

        The fleet is the first to leave `SERVING` and the last to be back.
        """
        part = [each for each in self._replicas.values() if each.stage is not Stage.FENCED]
        reported = _REPORTED[Stage(self.phase)]
        if any(each.stage is not reported for each in part):
            return
        onward = _ONWARD[reported]
        if onward is Stage.SERVING:
            self.epoch += 1
            self.digest = self._wanted
        for each in part:
            self._move(each, onward)
        self._enter(Phase(onward))

    def _go_on_without(self, fenced: _Replica) -> None:
        """A refit lost one of its replicas."""
        if self._on_failure == "fail":
            self._enter(Phase.FAILED, fenced.reason)
        elif len(self.fenced) == len(self._replicas):
            self._enter(Phase.FAILED, f"no replica is left: {fenced.reason}")
        else:
            self._go_on_together()

    def _enter(self, phase: Phase, reason: str = "") -> None:
        before = self.phase
        if phase not in _PHASES[before]:
            why = f": {self.reason}" if self.reason else ""
            raise RefitError(f"no transition from {before} to {phase}{why}")
        self.phase, self.reason = phase, reason
        self._record(Transition(None, before, phase, self.epoch, reason))

    def _move(self, replica: _Replica, stage: Stage, reason: str = "") -> None:
        before = replica.stage
        if stage not in _STAGES[before]:
            raise RefitError(f"replica {replica.number}: no transition from {before} to {stage}")
        replica.stage, replica.reason = stage, reason
        replica.deadline = self._clock() + self._timeouts.get(stage, float("inf"))
        if stage is Stage.UPDATING:
            replica.epoch = None
        elif stage is Stage.SERVING:
            replica.epoch = self.epoch
        self._record(Transition(replica.number, before, stage, self.epoch, reason))
