"""Refits, fences and rejoins in any order, against a model of what the replicas really hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_refit import PHASES, QUIET_S, STAGES, UPDATE_S

from nemo_war.generation.refit import Phase, RefitCycle, RefitError, Transition

REPLICAS = 3
TIMEOUTS = {"quiet": QUIET_S, "load": UPDATE_S, "reset": UPDATE_S}
PHASE_OF = {"quiet": Phase.QUIETING, "load": Phase.UPDATING, "reset": Phase.RESETTING}


class World:
    """What is really so, kept apart from how the cycle keeps it.

    Of each replica: which bytes it holds, whether its caches were reset since it loaded
    them, and whether it is out, in the refit or on its way back. There are no stages: what
    a phase waits for follows from who of those taking part has done what.
    """

    def __init__(self, digest: str, may_go_on: bool) -> None:
        everyone = range(REPLICAS)
        self.digest = self.target = digest
        self.may_go_on = may_go_on
        self.bytes = dict.fromkeys(everyone, digest)
        self.clean = dict.fromkeys(everyone, True)
        self.epoch, self.now = 0, 0.0
        self.failed = self.refit = False
        self.out: set[int] = set()
        self.coming: set[int] = set()
        self.done: dict[str, set[int]] = {"quiet": set(), "load": set(), "reset": set()}
        self.asked_at = dict.fromkeys(everyone, 0.0)

    @property
    def part(self) -> set[int]:
        return set(range(REPLICAS)) - self.out if self.refit else self.coming

    @property
    def duty(self) -> str:
        """What the refit waits for."""
        return next((duty for duty, done in self.done.items() if self.part - done), "")

    def duty_of(self, replica: int) -> str:
        """What this replica is asked for; nothing, if it waits for others, serves or is out."""
        if self.failed or replica not in self.part:
            return ""
        if not self.refit:
            return "reset" if replica in self.done["load"] else "load"
        return "" if replica in self.done[self.duty] else self.duty

    def waiting(self) -> set[int]:
        return {replica for replica in self.part if self.duty_of(replica)}

    def serving(self) -> set[int]:
        return set() if self.failed or self.refit else set(range(REPLICAS)) - self.out - self.coming

    def late(self) -> set[int]:
        return {
            replica
            for replica in self.waiting()
            if self.now - self.asked_at[replica] > TIMEOUTS[self.duty_of(replica)]
        }

    def phase(self) -> Phase:
        if self.failed:
            return Phase.FAILED
        return PHASE_OF[self.duty] if self.refit else Phase.SERVING

    def ask(self, replicas: set[int]) -> None:
        for replica in replicas:
            self.asked_at[replica] = self.now

    def begin(self, digest: str, members: set[int]) -> None:
        self.target, self.refit = digest, True
        self.out, self.coming = set(range(REPLICAS)) - members, set()
        self.done = {duty: set() for duty in self.done}
        self.ask(members)

    def rejoin(self, replica: int) -> None:
        self.out.remove(replica)
        self.coming.add(replica)
        for done in self.done.values():
            done.discard(replica)
        self.ask({replica})

    def do(self, replica: int, duty: str) -> None:
        """The replica did what it was asked for."""
        before = self.duty
        self.done[duty].add(replica)
        if self.refit:
            self.settle(before)
        elif duty == "reset":
            self.coming.remove(replica)
        else:
            self.ask({replica})

    def lose(self, replica: int) -> None:
        before = self.duty
        self.out.add(replica)
        self.coming.discard(replica)
        if self.refit and not (self.may_go_on and self.part):
            self.failed = True
        elif self.refit:
            self.settle(before)

    def settle(self, before: str) -> None:
        """A refit is over when nothing is left to wait for; a new duty is given to all that take part."""
        if not self.duty:
            self.refit, self.epoch, self.digest = False, self.epoch + 1, self.target
        elif self.duty != before:
            self.ask(self.part)


replicas = st.integers(0, REPLICAS - 1)
digests = st.sampled_from(["w1", "w2"])


class AnyOrder(RuleBasedStateMachine):
    """Whatever is asked and reported, in any order: the cycle says what is so, and refuses the rest."""

    on_failure = "fail"

    @initialize(digest=st.sampled_from(["", "w0"]))
    def start(self, digest: str) -> None:
        self.world = World(digest, self.on_failure == "continue")
        self.last: dict[int | None, str] = {}
        self.epochs = [0]
        self.cycle = RefitCycle(
            range(REPLICAS),
            in_flight="drain",
            on_failure=self.on_failure,  # type: ignore[arg-type]
            quiet_timeout_s=QUIET_S,
            update_timeout_s=UPDATE_S,
            clock=lambda: self.world.now,
            digest=digest,
            record=self.listen,
        )

    def listen(self, told: Transition) -> None:
        assert told.before == self.last.get(told.replica, "serving"), "the records do not chain"
        self.last[told.replica] = told.after
        assert (told.before, told.after) in (PHASES if told.replica is None else STAGES)
        assert bool(told.reason) == (told.after in ("fenced", "failed"))
        assert told.epoch == self.cycle.epoch
        if told.epoch != self.epochs[-1]:
            self.epochs.append(told.epoch)
        self.whoever_serves_is_fresh()

    def whoever_serves_is_fresh(self) -> None:
        for replica in range(REPLICAS):
            if self.cycle.serves(replica):
                assert self.cycle.admits
                assert self.world.bytes[replica] == self.cycle.digest, "it serves other weights"
                assert self.world.clean[replica], "it serves KV of other weights"
                assert self.cycle.epoch_of(replica) == self.cycle.epoch

    def refused(self, act: Callable[[], object]) -> None:
        before, last = self.cycle.phase, dict(self.last)
        with pytest.raises(RefitError):
            act()
        assert self.cycle.phase is before
        assert self.last == last

    @rule(digest=digests, members=st.sets(replicas, min_size=1))
    def begin(self, digest: str, members: set[int]) -> None:
        if self.world.phase() is not Phase.SERVING:
            self.refused(lambda: self.cycle.begin(digest, members))
            return
        self.world.begin(digest, members)
        self.cycle.begin(digest, members)

    @precondition(lambda self: self.world.phase() is Phase.SERVING)
    @rule(digest=digests, members=st.sets(replicas, min_size=1))
    def refit(self, digest: str, members: set[int]) -> None:
        """One that goes well, so that much happens after the first, too."""
        self.begin(digest, members)
        while self.world.refit:
            self.oblige(min(self.world.waiting()))

    @rule(replica=replicas)
    def quiet(self, replica: int) -> None:
        self.report(replica, "quiet", True, lambda: self.cycle.quiet(replica))

    @rule(replica=replicas, right=st.booleans())
    def load(self, replica: int, right: bool) -> None:
        """A load, if one was asked for or goes on since before the replica was fenced; and its report."""
        digest = self.world.target if right else "torn"
        if self.world.duty_of(replica) == "load" or replica in self.world.out:
            self.world.bytes[replica], self.world.clean[replica] = digest, False
        self.report(replica, "load", right, lambda: self.cycle.updated(replica, digest))

    @rule(replica=replicas, ok=st.booleans())
    def reset(self, replica: int, ok: bool) -> None:
        """A reset likewise; where it is refused nothing was reset."""
        if self.world.duty_of(replica) == "reset" or replica in self.world.out:
            self.world.clean[replica] |= ok
        self.report(replica, "reset", ok, lambda: self.cycle.reset(replica, ok))

    def report(self, replica: int, duty: str, well: bool, tell: Callable[[], bool]) -> None:
        world = self.world
        if world.failed or replica in world.out:
            assert tell() is False
        elif world.duty_of(replica) != duty:
            self.refused(tell)
        else:
            if well:
                world.do(replica, duty)
            else:
                world.lose(replica)
            assert tell() is True

    @precondition(lambda self: self.world.waiting())
    @rule(picks=st.lists(replicas, min_size=1, max_size=3 * REPLICAS), well=st.booleans())
    def proceed(self, picks: list[int], well: bool) -> None:
        """Some do what they are waited for, the last of them perhaps badly."""
        for pick in picks[:-1]:
            if waiting := sorted(self.world.waiting()):
                self.oblige(waiting[pick % len(waiting)])
        if waiting := sorted(self.world.waiting()):
            self.oblige(waiting[picks[-1] % len(waiting)], well)

    def oblige(self, replica: int, well: bool = True) -> None:
        duty = self.world.duty_of(replica)
        if duty == "quiet":
            self.quiet(replica)
        elif duty == "load":
            self.load(replica, well)
        else:
            self.reset(replica, well)
        self.the_cycle_says_what_is_so()

    @precondition(lambda self: not self.world.failed)
    @rule(replica=replicas)
    def fence(self, replica: int) -> None:
        """It may have died, and come back with no telling what."""
        news = replica not in self.world.out
        self.world.bytes[replica], self.world.clean[replica] = "lost", False
        if news:
            self.world.lose(replica)
        assert self.cycle.fence(replica, "died") is news

    @rule(replica=replicas)
    def rejoin(self, replica: int) -> None:
        world = self.world
        replica = min(world.out, default=replica)
        if world.phase() is Phase.SERVING and replica in world.out and world.digest:
            world.rejoin(replica)
            self.cycle.rejoin(replica)
        else:
            self.refused(lambda: self.cycle.rejoin(replica))

    @rule(seconds=st.sampled_from([1.0, 4.0, QUIET_S, UPDATE_S]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        late = self.world.late()
        for replica in sorted(late):
            if self.world.failed:
                self.world.out.add(replica)
            else:
                self.world.lose(replica)
        self.cycle.check_deadlines()
        assert late <= self.cycle.fenced.keys()

    @invariant()
    def the_cycle_says_what_is_so(self) -> None:
        cycle, world = self.cycle, self.world
        assert (cycle.phase, cycle.epoch, cycle.digest) == (world.phase(), world.epoch, world.digest)
        assert cycle.admits == (world.phase() is Phase.SERVING)
        assert cycle.waiting_for == world.waiting()
        assert cycle.fenced.keys() == world.out
        assert {replica for replica in range(REPLICAS) if cycle.serves(replica)} == world.serving()
        assert bool(cycle.reason) == world.failed
        assert self.epochs == list(range(world.epoch + 1))
        assert cycle.phase == self.last.get(None, "serving"), "a transition was not told of"
        assert all(cycle.stage_of(each) == self.last.get(each, "serving") for each in range(REPLICAS))
        self.whoever_serves_is_fresh()


class GoingOn(AnyOrder):
    """The same, where the others may go on without a replica."""

    on_failure = "continue"


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
GoingOn.TestCase.settings = AnyOrder.TestCase.settings
TestAnyOrderOfEventsWhereOneFailureFailsAll = AnyOrder.TestCase
TestAnyOrderOfEventsWhereTheOthersGoOn = GoingOn.TestCase
