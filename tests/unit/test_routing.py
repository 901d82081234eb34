from __future__ import annotations

from collections import Counter

import pytest

from nemo_war.metadata import TurnMetadata
from nemo_war.routing.round_robin import RoundRobin
from nemo_war.routing.scheduler import NoReplicaError, Placement, ReplicaFacts, TurnFacts
from nemo_war.routing.sticky import Sticky

FOUR = [ReplicaFacts(replica) for replica in range(4)]
TWO = FOUR[:2]


def turn(trajectory: str, group: str = "g", number: int = 0) -> TurnFacts:
    return TurnFacts(TurnMetadata(trajectory, group, number), prompt_tokens=100, max_new_tokens=10)


def test_round_robin_takes_each_replica_in_turn() -> None:
    policy = RoundRobin()
    assert [policy.choose(turn("t"), FOUR).replica for _ in range(6)] == [0, 1, 2, 3, 0, 1]


def test_a_trajectory_stays_where_it_began() -> None:
    policy = Sticky()
    policy.begin_step(8)
    homes = {name: policy.choose(turn(name, name), FOUR).replica for name in "abcdefgh"}
    for number in range(1, 5):
        assert {name: policy.choose(turn(name, name, number), FOUR).replica for name in homes} == homes


def test_siblings_share_a_replica_while_their_share_lasts() -> None:
    policy = Sticky()
    policy.begin_step(16)
    homes = {
        (g, s): policy.choose(turn(f"{g}{s}", f"group{g}"), FOUR).replica for g in range(4) for s in range(4)
    }
    for group in range(4):
        assert len({homes[group, sibling] for sibling in range(4)}) == 1
    assert Counter(homes.values()) == dict.fromkeys(range(4), 4)


def test_one_large_group_leaves_no_replica_idle() -> None:
    policy = Sticky()
    policy.begin_step(64)
    homes = Counter(policy.choose(turn(f"t{n}"), FOUR).replica for n in range(64))
    assert homes == dict.fromkeys(range(4), 16)


def test_one_large_group_is_spread_even_when_its_size_was_not_announced() -> None:
    policy = Sticky()
    homes = Counter(policy.choose(turn(f"t{n}"), FOUR).replica for n in range(64))
    assert max(homes.values()) <= 24
    assert len(homes) == 4


def test_quiet_moments_do_not_all_go_to_replica_zero() -> None:
    policy = Sticky(seed=1)
    served: Counter[int] = Counter()
    for number in range(200):
        placement = policy.choose(turn(f"t{number}", f"g{number}"), FOUR)
        served[placement.replica] += 1
        policy.finish(placement)
    assert min(served.values()) >= 30


def test_a_burst_sees_its_own_reservations() -> None:
    policy = Sticky()
    placed = Counter(policy.choose(turn(f"t{n}", f"g{n}"), FOUR).replica for n in range(40))
    assert set(placed.values()) == {10}


def test_a_trajectory_leaves_a_dead_replica_and_stays_at_the_new_one() -> None:
    policy = Sticky()
    home = policy.choose(turn("t"), TWO).replica
    other = 1 - home
    dead = [ReplicaFacts(replica, healthy=replica != home) for replica in range(2)]
    assert policy.choose(turn("t", number=1), dead).replica == other
    assert policy.choose(turn("t", number=2), TWO).replica == other


@pytest.mark.parametrize("policy", [Sticky(), RoundRobin()])
def test_no_healthy_replica_is_an_error(policy: Sticky | RoundRobin) -> None:
    with pytest.raises(NoReplicaError, match="none of the 2 replicas is healthy"):
        policy.choose(turn("t"), [ReplicaFacts(0, False), ReplicaFacts(1, False)])


def test_every_reservation_is_released_once() -> None:
    policy = Sticky()
    placements = [policy.choose(turn(f"t{n}"), TWO) for n in range(10)]
    for placement in placements:
        policy.finish(placement)
    assert policy.in_flight(0) == policy.in_flight(1) == 0
    with pytest.raises(ValueError, match="no turn in flight"):
        policy.finish(placements[0])


def test_a_new_step_forgets_homes_and_keeps_turns_in_flight() -> None:
    policy = Sticky()
    policy.begin_step(2)
    placement = policy.choose(turn("a"), TWO)
    policy.begin_step(2)
    assert policy.in_flight(placement.replica) == 1
    policy.finish(Placement(placement.replica, "a"))


def test_the_same_seed_gives_the_same_decisions() -> None:
    def decisions() -> list[int]:
        policy = Sticky(seed=3)
        return [policy.choose(turn(f"t{n}", f"g{n // 3}"), FOUR).replica for n in range(50)]

    assert decisions() == decisions()
