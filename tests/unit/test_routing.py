from __future__ import annotations

from collections import Counter

import pytest

from nemo_war.config import PolicyName
from nemo_war.metadata import TurnMetadata
from nemo_war.routing import policies
from nemo_war.routing.facts import Outcome, Placement, ReplicaFacts, TurnFacts
from nemo_war.routing.scheduler import NoReplicaError, Scheduler

FOUR = [ReplicaFacts(replica) for replica in range(4)]
TWO = FOUR[:2]
ALL: list[PolicyName] = [
    "war", "sticky", "least_outstanding", "round_robin", "consistent_hash", "published",
]  # fmt: skip
BALANCING: list[PolicyName] = ["war", "sticky", "least_outstanding", "published"]


def turn(trajectory: str, group: str = "g", number: int = 0) -> TurnFacts:
    return TurnFacts(TurnMetadata(trajectory, group, number), prompt_tokens=100, max_new_tokens=10)


def scheduler(name: PolicyName, seed: int = 0) -> Scheduler:
    return Scheduler(policies.make(name, seed))


def place(
    on: Scheduler, facts: TurnFacts, replicas: list[ReplicaFacts] = FOUR, now: float = 0.0
) -> Placement:
    on.submit(facts, now)
    (placement,) = on.decide(replicas, now)
    return placement


def test_round_robin_takes_each_replica_in_turn() -> None:
    on = scheduler("round_robin")
    assert [place(on, turn(f"t{n}")).replica for n in range(6)] == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("name", ["sticky", "consistent_hash", "published", "war"])
def test_a_trajectory_stays_where_it_began(name: PolicyName) -> None:
    on = scheduler(name)
    on.begin_step(8)
    homes = {}
    for number in range(5):
        placed = {each: place(on, turn(each, each, number)) for each in "abcdefgh"}
        for placement in placed.values():
            on.finish(placement.ticket, Outcome(10, 90), 0.0)
        homes = homes or {each: placement.replica for each, placement in placed.items()}
        if name != "war":  # without token ids it does not know where the KV is
            assert {each: placement.replica for each, placement in placed.items()} == homes


def test_siblings_share_a_replica_while_their_share_lasts() -> None:
    on = scheduler("sticky")
    on.begin_step(16)
    homes = {(g, s): place(on, turn(f"{g}{s}", f"group{g}")).replica for g in range(4) for s in range(4)}
    for group in range(4):
        assert len({homes[group, sibling] for sibling in range(4)}) == 1
    assert Counter(homes.values()) == dict.fromkeys(range(4), 4)


@pytest.mark.parametrize("name", BALANCING)
def test_one_large_group_leaves_no_replica_idle(name: PolicyName) -> None:
    on = scheduler(name)
    on.begin_step(64)
    homes = Counter(place(on, turn(f"t{n}")).replica for n in range(64))
    assert homes == dict.fromkeys(range(4), 16)


def test_one_large_group_is_spread_even_when_its_size_was_not_announced() -> None:
    on = scheduler("sticky")
    homes = Counter(place(on, turn(f"t{n}")).replica for n in range(64))
    assert max(homes.values()) <= 24
    assert len(homes) == 4


@pytest.mark.parametrize("name", BALANCING)
def test_quiet_moments_do_not_all_go_to_replica_zero(name: PolicyName) -> None:
    on = scheduler(name, seed=1)
    served: Counter[int] = Counter()
    for number in range(200):
        placement = place(on, turn(f"t{number}", f"g{number}"), now=float(number))
        served[placement.replica] += 1
        on.finish(placement.ticket, Outcome(10, 0), number + 0.5)
        on.end(f"t{number}")
    assert min(served.values()) >= 30


@pytest.mark.parametrize("name", BALANCING)
def test_a_burst_sees_its_own_reservations(name: PolicyName) -> None:
    on = scheduler(name)
    for number in range(40):
        on.submit(turn(f"t{number}", f"g{number}"), 0.0)
    placed = Counter(placement.replica for placement in on.decide(FOUR, 0.0))
    assert set(placed.values()) == {10}


@pytest.mark.parametrize("name", ["sticky", "consistent_hash", "published"])
def test_a_trajectory_leaves_a_dead_replica_and_the_others_stay(name: PolicyName) -> None:
    on = scheduler(name)
    homes = {each: place(on, turn(each, each)).replica for each in "abcdefgh"}
    dead = homes["a"]
    left = [ReplicaFacts(replica, healthy=replica != dead) for replica in range(4)]
    on.lost(dead)
    for each, home in homes.items():
        replica = place(on, turn(each, each, 1), left).replica
        assert replica != dead
        assert home in (dead, replica)


@pytest.mark.parametrize("name", ALL)
def test_no_healthy_replica_is_an_error_and_the_turn_stays_queued(name: PolicyName) -> None:
    on = scheduler(name)
    on.submit(turn("t"), 0.0)
    with pytest.raises(NoReplicaError, match="1 turns wait"):
        on.decide([ReplicaFacts(0, healthy=False)], 0.0)
    assert [placement.replica for placement in on.decide(TWO[:1], 0.0)] == [0]


@pytest.mark.parametrize("name", ALL)
def test_a_turn_finishes_once(name: PolicyName) -> None:
    on = scheduler(name)
    placement = place(on, turn("t"))
    on.finish(placement.ticket, None, 0.0)
    with pytest.raises(ValueError, match="not running"):
        on.finish(placement.ticket, None, 0.0)


@pytest.mark.parametrize("name", ALL)
def test_the_same_seed_places_the_same(name: PolicyName) -> None:
    def placements() -> list[int]:
        on = scheduler(name, seed=3)
        return [place(on, turn(f"t{n}", f"g{n % 7}")).replica for n in range(50)]

    assert placements() == placements()


@pytest.mark.parametrize("name", ALL)
def test_a_step_forgets_the_one_before(name: PolicyName) -> None:
    on = scheduler(name)
    on.begin_step(4)
    for each in "abcd":
        on.finish(place(on, turn(each)).ticket, Outcome(10, 0), 0.0)
    on.begin_step(4)
    assert on.check_integrity()
    assert not any(books.trajectories for books in on.books.values())
