from __future__ import annotations

import numpy as np
import pytest

from nemo_war.config import StepTimePrior
from nemo_war.generation.step_time import StepTimeModel
from nemo_war.routing.cost import Costs, Demand, Load, Pace, cost
from nemo_war.routing.options import Weights

PACE = Pace(base=0.02, request=1e-4, token=2e-5, context=2e-8)
NOTHING = Weights(0, 0, 0, 0, 0)
NOW = 100.0


def busy(seed: int = 0, replicas: int = 6) -> Load:
    """Replicas of different speed, with turns in flight, and trajectories whose tools run."""
    random, load = np.random.default_rng(seed), Load()
    for replica in range(replicas):
        load.learn(replica, Pace(*(np.array(PACE) * random.uniform(0.5, 2, 4))))
    for number in range(20 * replicas):
        replica, context = int(random.integers(replicas)), int(random.integers(100, 20_000))
        load.add(replica, f"t{number}", context, random.exponential(), NOW - 10 * random.random())
        if random.random() < 0.5:
            load.remove(replica, context)
    return load


def costs_on(
    load: Load,
    demand: Demand,
    weights: Weights | None = None,
    cached: int = 0,
    seed: int = 0,
    spared: float = 0.0,
) -> Costs:
    """Of a turn on every replica, each with so many tokens cached, and siblings that spare so much."""
    replicas = np.arange(len(load.running))
    known, drafted = np.full(len(replicas), cached), np.full(len(replicas), spared)
    return cost(load, replicas, known, drafted, demand, NOW, weights or Weights(), seed)


def expected(load: Load, cached: np.ndarray, spared: np.ndarray, demand: Demand, weights: Weights) -> Costs:
    """What the module says that it costs."""
    base, request, token, attended = load.paces.T
    steps_now = base + request * load.running + attended * load.context
    joining = request + attended * demand.context
    usual = load.live * load.running.sum() / max(1, load.live.sum())
    prefill = token * (demand.context - cached)
    queue = np.maximum(0, load.busy_until - NOW)
    pace = demand.output * (steps_now + joining) + demand.later * (base + (usual + 1) * joining)
    others = load.running * prefill + joining * (load.running * demand.output + usual * demand.later)
    worth_now, worth_later = (np.maximum(0, base - batch * token) for batch in (load.running, usual))
    siblings = -spared * (demand.output * worth_now + demand.later * worth_later)
    terms = np.array([prefill, queue, pace, others, siblings])
    keeping_s = token * np.maximum(1, load.running) * steps_now / base
    return Costs(np.array(weights) @ terms, keeping_s)


@pytest.mark.parametrize("seed", range(5))
def test_costs_are_those_of_the_formula(seed: int) -> None:
    random, load = np.random.default_rng(seed), busy(seed)
    demand = Demand(30_000, random.exponential(200), random.exponential(2000))
    cached = random.integers(0, 30_000, len(load.running))
    weights, spared = Weights(*random.uniform(0, 2, 5)), random.uniform(0, 1, len(cached))
    found = cost(load, np.arange(len(cached)), cached, spared, demand, NOW, weights, seed)
    wanted = expected(load, cached, spared, demand, weights)
    assert found.seconds == pytest.approx(wanted.seconds, rel=2e-3)
    assert found.keeping_s == pytest.approx(wanted.keeping_s)


@pytest.mark.parametrize("term", Weights._fields)
def test_a_weight_of_zero_leaves_its_term_out(term: str) -> None:
    load, demand = busy(), Demand(30_000, 200.0, 2000.0)
    load.busy_until[:] = NOW + 10

    def seconds(weights: Weights) -> np.ndarray:
        return costs_on(load, demand, weights, spared=0.5).seconds

    missing = seconds(Weights()) - seconds(Weights()._replace(**{term: 0.0}))
    assert missing == pytest.approx(seconds(NOTHING._replace(**{term: 1.0})))
    assert (missing < 0 if term == "siblings" else missing > 0).all()


def test_without_any_term_everything_is_free() -> None:
    assert not costs_on(busy(), Demand(1000, 100.0, 100.0), NOTHING, spared=0.5).seconds.any()


def test_only_the_replicas_asked_for_are_priced_in_their_order() -> None:
    load, demand = busy(), Demand(1000, 100.0, 500.0)
    some = cost(load, np.array([4, 1]), np.zeros(2, dtype=np.int64), np.zeros(2), demand, NOW, Weights(), 0)
    assert some.seconds == pytest.approx(costs_on(load, demand).seconds[[4, 1]], rel=2e-3)


def test_of_equal_replicas_each_is_the_cheapest_for_some() -> None:
    load = Load()
    for replica in range(4):
        load.learn(replica, PACE)
    first = [int(costs_on(load, Demand(1000, 100.0, 0.0), seed=seed).seconds.argmin()) for seed in range(200)]
    assert np.bincount(first, minlength=4).min() >= 20


def test_of_two_replicas_the_faster_one_is_cheaper() -> None:
    load = Load()
    load.learn(0, PACE)
    load.learn(1, Pace(*(0.5 * np.array(PACE))))
    slow, fast = costs_on(load, Demand(1000, 100.0, 500.0)).seconds
    assert fast == pytest.approx(slow / 2, rel=2e-3)


def test_siblings_draw_until_so_many_run_that_drafts_cost_more_than_they_spare() -> None:
    load = Load()
    load.learn(0, PACE)
    worth, demand = [], Demand(0, 100.0, 0.0)
    for number in range(1200):
        without, with_them = (costs_on(load, demand, spared=each).seconds.item() for each in (0.0, 0.25))
        worth.append(without - with_them)
        load.add(0, f"t{number}", 0, 0.0, NOW)
    assert worth[0] == pytest.approx(0.25 * 100 * PACE.base, rel=0.01)
    assert worth[500] == pytest.approx(worth[0] / 2, rel=0.01)
    assert worth[1001:] == pytest.approx([0.0] * 199)


def test_idle_kv_is_kept_longer_where_more_run() -> None:
    load = Load()
    for replica in range(2):
        load.learn(replica, PACE)
    for number in range(10):
        load.add(1, f"t{number}", 1000, 0.0, NOW)
    empty, full = costs_on(load, Demand(1000, 100.0, 0.0)).keeping_s
    assert empty == pytest.approx(PACE.token)
    assert full > 10 * empty


def test_where_a_step_costs_nothing_idle_kv_is_kept_for_ever() -> None:
    load = Load()
    load.learn(0, PACE._replace(base=0.0))
    assert costs_on(load, Demand(1000, 100.0, 0.0)).keeping_s.tolist() == [np.inf]


def test_a_pace_is_read_off_a_step_time_model() -> None:
    prior = StepTimePrior(base=20, per_request=0.1, per_token=0.02, per_kilotoken=0.05)
    assert Pace.of(StepTimeModel(prior)) == pytest.approx(
        (0.02, 0.1e-3 + 0.02e-3, 0.02e-3, 0.05e-6)  # a request is a token of each step
    )


def test_replicas_may_become_known_in_any_order() -> None:
    load, slow = Load(), Pace(*(2 * np.array(PACE)))
    load.learn(2, slow)
    load.add(2, "t", 1000, 1.0, NOW)
    load.learn(0, PACE)
    load.learn(4, PACE)
    assert len(load.paces) == len(load.busy_until) == 5
    assert load.paces[[0, 2, 4]].tolist() == [list(PACE), list(slow), list(PACE)]
    assert (load.running[2], load.live[2], load.context[2], load.busy_until[2]) == (1, 1, 1000, NOW + 1)


def test_prefill_queues_behind_what_is_there() -> None:
    load = Load()
    load.learn(0, PACE)
    load.add(0, "a", 1000, 2.0, NOW)
    load.add(0, "b", 1000, 3.0, NOW + 1)
    assert load.busy_until[0] == NOW + 5


def test_a_trajectory_lives_where_its_last_turn_was_until_it_is_over() -> None:
    load = Load()
    load.learn(0, PACE)
    load.learn(1, PACE)
    load.add(0, "t", 1000, 0.0, NOW)
    load.remove(0, 1000)
    load.add(1, "t", 1200, 0.0, NOW)
    load.add(1, "u", 500, 0.0, NOW)
    assert (load.live.tolist(), load.running.tolist(), load.duty) == ([0, 2], [0, 2], 1.0)
    load.remove(1, 1200)
    assert load.duty == 0.5
    load.end("t")
    load.end("t")
    assert (load.live.tolist(), load.running.tolist(), load.context.tolist()) == ([0, 1], [0, 1], [0, 500])


def test_nothing_is_queued_or_lives_on_a_lost_replica_but_its_turns_are_yet_to_end() -> None:
    load = Load()
    for replica in range(2):
        load.learn(replica, PACE)
        load.add(replica, f"t{replica}", 1000, 5.0, NOW)
    load.lost(0)
    load.lost(7)
    assert (load.busy_until.tolist(), load.live.tolist()) == ([0.0, NOW + 5], [0, 1])
    load.remove(0, 1000)
    assert (load.running.tolist(), load.context.tolist()) == ([0, 1], [0, 1000])
