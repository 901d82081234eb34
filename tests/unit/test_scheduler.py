from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nemo_war.config import PolicyName
from nemo_war.metadata import TurnMetadata
from nemo_war.routing import policies
from nemo_war.routing.facts import Outcome, Placement, ReplicaFacts, TurnFacts
from nemo_war.routing.scheduler import NoReplicaError, Scheduler

REPLICAS = 3


class AnyOrder(RuleBasedStateMachine):
    """Turns arrive, end, fail and are cancelled, replicas die, the policy is updated: in any order."""

    name: PolicyName = "war"

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(policies.make(self.name))
        self.now = 0.0
        self.epoch = 0
        self.healthy = [True] * REPLICAS
        self.waiting: dict[int, str] = {}
        self.running: dict[int, Placement] = {}
        self.contexts: dict[str, np.ndarray] = {}
        self.turns: dict[str, int] = {}

    def busy(self) -> set[str]:
        return {*self.waiting.values(), *(placement.trajectory for placement in self.running.values())}

    @rule(number=st.integers(0, 9), tokens=st.integers(1, 400))
    def submit(self, number: int, tokens: int) -> None:
        name = f"t{number}"
        if name in self.busy():
            return
        before = self.contexts.get(name, np.arange(number % 3, dtype=np.int32))
        new = np.arange(len(before), len(before) + tokens, dtype=np.int32) * (number + 1)
        self.contexts[name] = np.concatenate([before, new]).astype(np.int32)
        turn = self.turns[name] = self.turns.get(name, -1) + 1
        metadata = TurnMetadata(name, f"g{number % 3}", turn, self.epoch)
        facts = TurnFacts(metadata, len(self.contexts[name]), 50, self.contexts[name])
        self.waiting[self.scheduler.submit(facts, self.now)] = name

    @rule()
    def decide(self) -> None:
        replicas = [ReplicaFacts(n, healthy, 1500) for n, healthy in enumerate(self.healthy)]
        try:
            placements = self.scheduler.decide(replicas, self.now)
        except NoReplicaError:
            assert not any(self.healthy)
            assert self.waiting
            return
        for placement in placements:
            assert self.healthy[placement.replica]
            assert self.waiting.pop(placement.ticket) == placement.trajectory
            self.running[placement.ticket] = placement
        if not self.running and any(self.healthy):
            assert not self.waiting  # nothing runs that could make room, so something must go

    @precondition(lambda self: self.running)
    @rule(data=st.data(), output=st.integers(0, 50), failed=st.booleans())
    def finish(self, data: st.DataObject, output: int, failed: bool) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.running)))
        name = self.running.pop(ticket).trajectory
        cached = data.draw(st.integers(0, len(self.contexts[name])))
        self.scheduler.finish(ticket, None if failed else Outcome(output, cached), self.now)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[ticket]
        assert self.scheduler.cancel(ticket)
        assert not self.scheduler.cancel(ticket)

    @rule(number=st.integers(0, 9))
    def end(self, number: int) -> None:
        if f"t{number}" not in self.busy():
            self.scheduler.end(f"t{number}")
            self.contexts.pop(f"t{number}", None)
            self.turns.pop(f"t{number}", None)

    @rule(replica=st.integers(0, REPLICAS - 1))
    def die(self, replica: int) -> None:
        self.healthy[replica] = False
        self.scheduler.lost(replica)

    @rule(replica=st.integers(0, REPLICAS - 1))
    def come_back(self, replica: int) -> None:
        self.healthy[replica] = True

    @rule()
    def refit(self) -> None:
        self.epoch += 1

    @rule(seconds=st.floats(0, 200))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def nothing_is_lost_or_leaks(self) -> None:
        assert self.scheduler.check_integrity()
        assert self.scheduler.waiting == len(self.waiting)
        assert self.scheduler.running == len(self.running)
        assert sum(map(self.scheduler.running_on, range(REPLICAS))) == len(self.running)

    def teardown(self) -> None:
        """Whatever was admitted can end, and then nothing is held."""
        for ticket in list(self.running):
            self.scheduler.finish(ticket, Outcome(1, 0), self.now)
        for _ in range(20):
            if not self.scheduler.waiting:
                break
            for placement in self.scheduler.decide([ReplicaFacts(n) for n in range(REPLICAS)], self.now):
                self.scheduler.finish(placement.ticket, Outcome(1, 0), self.now)
        assert not self.scheduler.waiting
        for name in self.contexts:
            self.scheduler.end(name)
        assert self.scheduler.check_integrity()
        assert not any(books.trajectories for books in self.scheduler.books.values())


@pytest.mark.parametrize("policy", ["war", "published", "sticky"])
def test_books_balance_in_any_order_of_events(policy: PolicyName) -> None:
    machine = type("Machine", (AnyOrder,), {"name": policy})
    case = machine.TestCase
    case.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
    case("runTest").runTest()
