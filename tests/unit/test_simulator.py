from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from nemo_war.config import PolicyName, StepTimePrior
from nemo_war.generation.step_time import StepTimeModel
from nemo_war.routing import policies
from nemo_war.simulation.replica import ReplicaConfig
from nemo_war.simulation.simulator import Outage, Result, Simulator
from nemo_war.simulation.workload import Session, SessionTurn

STEP_TIME = StepTimeModel(StepTimePrior(base=20, per_request=0.1, per_token=0.1))
POLICIES: list[PolicyName] = ["war", "sticky", "round_robin", "published"]


def config(kv_tokens: int) -> ReplicaConfig:
    return ReplicaConfig(kv_tokens // 16, 16, 16, 1024, STEP_TIME)


def sessions(count: int, turns: int = 4, siblings: int = 4, tool_tokens: int = 50) -> list[Session]:
    """Groups of siblings with one prompt each, then tool answers and outputs of their own."""
    random = np.random.default_rng(0)

    def tokens(size: int) -> np.ndarray:
        return random.integers(0, 30_000, size, dtype=np.int32)

    def turn(prompt: np.ndarray) -> SessionTurn:
        return SessionTurn(prompt, tokens(int(random.integers(10, 60))), 1.0)

    made = []
    for group in range(count // siblings):
        prompt = tokens(4 * tool_tokens)
        for sibling in range(siblings):
            later = [turn(tokens(tool_tokens)) for _ in range(turns - 1)]
            made.append(Session(f"{group}/{sibling}", f"{group}", (turn(prompt), *later)))
    return made


def run(
    name: PolicyName, kv_tokens: int = 20_000, count: int = 32, replicas: int = 2, **more: object
) -> Result:
    policy = policies.make(name)
    return Simulator(sessions(count), [config(kv_tokens)] * replicas, policy, **more).run()  # type: ignore


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kv_tokens", [20_000, 1_600])
def test_every_turn_of_every_trajectory_is_served_once(name: PolicyName, kv_tokens: int) -> None:
    result = run(name, kv_tokens)
    assert Counter((turn.trajectory, turn.number) for turn in result.turns) == {
        (session.name, number): 1 for session in sessions(32) for number in range(4)
    }
    assert sum(result.output_tokens) == sum(len(t.output) for s in sessions(32) for t in s.turns)


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_seed_and_trace_give_the_same_decisions(name: PolicyName) -> None:
    assert run(name, 1_600) == run(name, 1_600)


def test_fewer_live_at_once_take_longer() -> None:
    assert run("sticky", concurrency=2).makespan_s > 2 * run("sticky").makespan_s


def test_war_computes_little_again_where_caches_are_scarce_and_moves_little_where_they_are_not() -> None:
    def rolled_out(name: PolicyName, kv_tokens: int) -> Result:
        made = sessions(64, turns=8, tool_tokens=400)
        return Simulator(made, [config(kv_tokens)] * 2, policies.make(name)).run()

    war, robin = rolled_out("war", 50_000), rolled_out("round_robin", 50_000)
    assert war.recomputed_tokens < 0.8 * robin.recomputed_tokens
    assert war.makespan_s < 0.9 * robin.makespan_s
    ample = rolled_out("war", 400_000)
    assert ample.moves < 0.05 * len(ample.turns)


@pytest.mark.parametrize("name", POLICIES)
def test_a_replica_that_dies_and_returns_loses_no_turn_and_repeats_none(name: PolicyName) -> None:
    result = run(name, outages=[Outage(0, 2.0, 6.0)])
    served = Counter((turn.trajectory, turn.number) for turn in result.turns)
    assert len(served) == 128
    assert set(served.values()) == {1}
    assert result.retried > 0
    assert not any(turn.replica == 0 and 2.0 < turn.ended_at < 6.0 for turn in result.turns)
    if name in ("war", "round_robin"):  # the others bring no trajectory back to it
        assert any(turn.replica == 0 and turn.ended_at > 6.0 for turn in result.turns)


def test_one_group_of_64_siblings_leaves_no_replica_idle() -> None:
    made = sessions(64, siblings=64)
    result = Simulator(made, [config(50_000)] * 4, policies.make("war")).run()
    first = Counter(turn.replica for turn in result.turns if turn.number == 0)
    assert min(first[replica] for replica in range(4)) >= 12


def test_more_than_the_caches_hold_waits_and_still_ends() -> None:
    result = run("war", 800, 48)
    assert len(result.turns) == 192
    waits = [turn.first_token_at - turn.submitted_at for turn in result.turns]
    assert max(waits) < 300
