"""A fleet whose replicas fail in every way, without Ray and without engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from fake_actors import FakeActors
from virtual_time import VirtualTimePolicy, now

from nemo_war.config import HealthConfig, RefitConfig
from nemo_war.generation.embedded import fleet as fleets
from nemo_war.generation.embedded.actors import ReplicaLostError
from nemo_war.generation.embedded.engine import EngineSpec
from nemo_war.generation.embedded.fleet import Fleet
from nemo_war.generation.embedded.turn import Answer, Turn
from nemo_war.generation.embedded.weights import Weights
from nemo_war.generation.refit import RefitError, Transition
from nemo_war.metadata import TurnMetadata
from nemo_war.routing.scheduler import NoReplicaError
from nemo_war.routing.sticky import Sticky

pytestmark = pytest.mark.asyncio


@pytest.fixture
def event_loop_policy() -> VirtualTimePolicy:
    """Deadlines of milliseconds must not depend on how busy the machine is."""
    return VirtualTimePolicy()


HEALTH = HealthConfig(probe_interval_s=0.02, probe_timeout_s=0.1, max_restarts=2)


class Job:
    """A fleet of fakes, and who generates on it."""

    def __init__(self, fleet: Fleet, transitions: list[Transition]) -> None:
        self.fleet = fleet
        self.actors: FakeActors = fleet._actors  # type: ignore[assignment]
        self.transitions = transitions
        self.dispatcher = fleet.dispatcher(Sticky())

    async def turn(self, name: str = "t", tokens: int = 5) -> tuple[int, Answer]:
        turn = Turn((1, 2, 3), TurnMetadata(name, name), tokens)
        return await self.fleet.generate(turn, self.dispatcher)

    def turns(self, count: int, tokens: int = 20) -> asyncio.Future[list[tuple[int, Answer]]]:
        return asyncio.gather(*(self.turn(f"t{number}", tokens) for number in range(count)))

    async def refit(self, digest: str) -> Any:
        return await self.fleet.refit(Weights(digest, digest, 0))

    async def until_serving(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.fleet.serving) < count:
                await asyncio.sleep(0.005)

    @property
    def reasons(self) -> list[str]:
        return [each.reason for each in self.transitions if each.reason]


@asynccontextmanager
async def job(
    monkeypatch: pytest.MonkeyPatch, replicas: int = 2, health: HealthConfig = HEALTH, **refit: Any
) -> AsyncIterator[Job]:
    monkeypatch.setattr(fleets, "Actors", FakeActors)
    monkeypatch.setattr(fleets, "time", SimpleNamespace(monotonic=now))
    transitions: list[Transition] = []
    settings = RefitConfig(
        **{"update_timeout_s": 0.5, "drain_timeout_s": 0.5, "on_failure": "continue"} | refit
    )
    fleet = Fleet(EngineSpec("m", {}, None), replicas, 1, settings, health, transitions.append)
    await fleet.start()
    made = Job(fleet, transitions)
    try:
        yield made
    finally:
        await fleet.stop()
    assert made.dispatcher.scheduler.running == made.dispatcher.scheduler.waiting == 0
    assert made.dispatcher.scheduler.check_integrity()
    assert not any(engine.stale for engine in made.actors.engines.values())
    assert len(asyncio.all_tasks()) == 1, asyncio.all_tasks()


async def test_turns_of_a_replica_that_dies_are_generated_elsewhere(monkeypatch) -> None:
    async with job(monkeypatch) as on:
        turns = on.turns(8)
        await asyncio.sleep(0.015)
        on.actors.crash(0)
        answers = await turns
        assert {replica for replica, _ in answers} == {1}
        assert all(len(answer.tokens) == 20 for _, answer in answers)
        assert on.fleet.retried == 4
        assert "replica 0 died" in on.reasons


async def test_a_lost_replica_comes_back_with_the_weights_of_the_epoch(monkeypatch) -> None:
    async with job(monkeypatch) as on:
        await on.refit("one")
        on.actors.crash(1)
        await asyncio.sleep(0.05)
        await on.until_serving(2)
        assert on.actors.engines[1].weights == "one"
        assert on.actors.engines[1].epoch == on.fleet.epoch == 1
        assert on.actors.asked[1, "reset_caches"] == 2


async def test_before_any_refit_it_comes_back_with_what_all_started_with(monkeypatch) -> None:
    async with job(monkeypatch) as on:
        on.actors.crash(1)
        await asyncio.sleep(0.05)
        await on.until_serving(2)
        assert on.actors.asked[1, "load_weights"] == 0
        assert on.actors.asked[1, "reset_caches"] == 1


async def test_a_replica_that_hangs_is_lost_and_its_turns_go_elsewhere(monkeypatch) -> None:
    async with job(monkeypatch) as on:
        on.actors.hang[0, "generate"] = 4
        on.actors.hang[0, "ping"] = 1
        answers = await on.turns(8)
        assert all(len(answer.tokens) == 20 for _, answer in answers)
        assert on.reasons == ["replica 0 did not ping within 0.1 s"]
        await on.until_serving(2)


async def test_a_replica_that_hangs_is_not_asked_for_a_second_time_before_it_is_started_anew(
    monkeypatch,
) -> None:
    async with job(monkeypatch) as on:
        on.actors.hang[0, "ping"] = 2
        await asyncio.sleep(0.15)
        await on.until_serving(2)
        assert on.actors.asked[0, "start"] == 2
        assert on.actors.hang[0, "ping"] == 1, "whatever it takes not to answer would be waited for twice"
        on.actors.hang[0, "ping"] = 0


async def test_a_replica_that_only_fails_to_update_is_fenced_until_it_has(monkeypatch) -> None:
    async with job(monkeypatch) as on:
        on.actors.refuse[0, "load_weights"] = 1
        outcome = await on.refit("one")
        assert (outcome.replicas, outcome.fenced, on.fleet.serving) == (1, 1, [1])
        assert on.reasons == ["replica 0 failed while updating: transfer broke off"]
        assert {replica for replica, _ in await on.turns(4)} == {1}
        await on.until_serving(2)
        assert on.actors.engines[0].weights == "one"
        assert on.actors.asked[0, "start"] == 1, "it need not have been started again"


@pytest.mark.parametrize("method", ["load_weights", "reset_caches", "set_epoch", "pause"])
async def test_a_replica_that_hangs_in_a_refit_is_left_behind(monkeypatch, method: str) -> None:
    async with job(monkeypatch, in_flight="pause", drain_timeout_s=0.2, update_timeout_s=0.2) as on:
        on.actors.hang[0, method] = 1
        outcome = await on.refit("one")
        assert (outcome.epoch, outcome.fenced) == (1, 1)
        assert {answer.tokens for _, answer in await on.turns(2, 1)} == {(1,)}
        await on.until_serving(2)


async def test_by_default_the_step_fails_and_whoever_waits_is_told(monkeypatch) -> None:
    async with job(monkeypatch, on_failure="fail") as on:
        running = asyncio.ensure_future(on.turn("running", 40))
        await asyncio.sleep(0.01)
        on.actors.refuse[0, "reset_caches"] = 1
        refit = asyncio.ensure_future(on.refit("one"))
        await asyncio.sleep(0.01)
        waiting = asyncio.ensure_future(on.turn("waiting"))
        with pytest.raises(RefitError, match="replica 0 did not reset its prefix cache"):
            await refit
        assert len((await running)[1].tokens) == 40
        for turn in (waiting, on.turn("late")):
            with pytest.raises(RefitError):
                await turn
        assert on.fleet.epoch == 0


@pytest.mark.parametrize(
    ("in_flight", "epochs"), [("drain", {(0, 0)}), ("pause", {(0, 1)}), ("abort", {(1, 1)})]
)
async def test_turns_in_flight_finish_freeze_or_are_generated_again(monkeypatch, in_flight, epochs) -> None:
    async with job(monkeypatch, in_flight=in_flight) as on:
        turns = on.turns(4, 30)
        await asyncio.sleep(0.02)
        outcome = await on.refit("one")
        answers = await turns
        assert outcome.in_flight == 4
        assert {answer.epochs for _, answer in answers} == epochs
        assert all(len(answer.tokens) == 30 for _, answer in answers)
        assert on.fleet.retried == (4 if in_flight == "abort" else 0)


async def test_a_turn_on_its_way_to_a_replica_is_taken_back_like_those_that_run_there(monkeypatch) -> None:
    async with job(monkeypatch, in_flight="abort") as on:
        on.actors.slow["generate"] = 0.05
        turns = on.turns(4)
        await asyncio.sleep(0.01)
        outcome = await on.refit("one")
        assert (outcome.in_flight, outcome.fenced, on.reasons) == (4, 0, [])
        assert {answer.epochs for _, answer in await turns} == {(1, 1)}


async def test_a_replica_that_dies_while_it_drains_holds_nobody_up(monkeypatch) -> None:
    async with job(monkeypatch) as on:
        turns = on.turns(4, 60)
        await asyncio.sleep(0.01)
        refit = asyncio.ensure_future(on.refit("one"))
        await asyncio.sleep(0.01)
        on.actors.crash(0)
        outcome = await refit
        answers = await turns
        assert outcome.epoch == 1
        assert sorted(answer.epochs for _, answer in answers) == [(0, 0), (0, 0), (1, 1), (1, 1)]


async def test_a_refit_waits_for_a_replica_to_come_back_where_none_serves(monkeypatch) -> None:
    async with job(monkeypatch, replicas=1) as on:
        on.actors.crash(0)
        await asyncio.sleep(0.03)
        assert (await on.refit("one")).epoch == 1
        assert (await on.turn())[1].tokens == (1,) * 5


async def test_a_replica_that_does_not_start_again_stays_away(monkeypatch) -> None:
    async with job(monkeypatch) as on:
        on.actors.broken.add(0)
        on.actors.crash(0)
        await asyncio.sleep(0.3)
        assert on.actors.asked[0, "start"] == 1 + HEALTH.max_restarts
        assert {replica for replica, _ in await on.turns(4)} == {1}


async def test_without_any_replica_turns_wait_and_then_there_is_one_clear_error(monkeypatch) -> None:
    async with job(monkeypatch) as on:
        on.actors.broken |= {0, 1}
        turns = asyncio.gather(*(on.turn(f"t{number}", 50) for number in range(4)), return_exceptions=True)
        await asyncio.sleep(0.01)
        on.actors.crash(0)
        on.actors.crash(1)
        errors = await turns
        assert {type(error) for error in errors} == {NoReplicaError}
        assert str(errors[0]) == (
            "no replica is left: replica 0 did not start again: no memory; "
            "replica 1 did not start again: no memory"
        )
        with pytest.raises(NoReplicaError):
            await on.turn()
        with pytest.raises(NoReplicaError):
            await on.refit("one")


async def test_a_turn_that_kills_replicas_does_not_kill_them_all(monkeypatch) -> None:
    health = HealthConfig(probe_interval_s=0.02, probe_timeout_s=0.1, max_restarts=100)
    async with job(monkeypatch, replicas=5, health=health) as on:

        async def deadly() -> None:
            while True:
                for number in list(on.actors.engines):
                    if on.fleet._running(number):
                        on.actors.crash(number)
                await asyncio.sleep(0.001)

        killer = asyncio.create_task(deadly())
        with pytest.raises(ReplicaLostError):
            await on.turn("poison", 1000)
        killer.cancel()
        assert len([reason for reason in on.reasons if reason.endswith("died")]) == 3


async def test_a_self_check_finds_a_replica_that_pretends_before_a_turn_is_placed_there(monkeypatch) -> None:
    async with job(monkeypatch, replicas=3, self_check=True) as on:
        await on.turns(3)
        assert (await on.refit("one")).fenced == 0
        await on.turns(3)
        on.actors.pretend.add(1)
        turns, outcome = await asyncio.gather(on.turns(6), on.refit("two"))
        assert (outcome.epoch, outcome.fenced) == (2, 1)
        assert 0 < outcome.self_check_s < outcome.seconds
        assert "replica 1 has stale KV" in on.reasons[0]
        await on.until_serving(3)
        assert len(turns) == 6


async def test_where_a_self_check_fails_the_step_does_by_default(monkeypatch) -> None:
    async with job(monkeypatch, self_check=True, on_failure="fail") as on:
        await on.turns(2)
        on.actors.pretend.add(0)
        with pytest.raises(RefitError, match="self-check of epoch 1 failed: replica 0 has stale KV"):
            await on.refit("one")


async def test_a_cancelled_turn_leaves_nothing_behind(monkeypatch) -> None:
    async with job(monkeypatch) as on:
        turn = asyncio.ensure_future(on.turn("t", 1000))
        await asyncio.sleep(0.01)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert not on.fleet._running(0) + on.fleet._running(1)


@pytest.mark.parametrize("in_flight", ["drain", "pause", "abort"])
@pytest.mark.parametrize("seed", range(20))
async def test_under_random_faults_every_turn_is_answered_once_and_none_is_stale(
    monkeypatch, seed: int, in_flight: str
) -> None:
    random = Random(seed)
    health = HealthConfig(probe_interval_s=0.02, probe_timeout_s=0.1, max_restarts=1000)
    refit = {"in_flight": in_flight, "drain_timeout_s": 0.3, "update_timeout_s": 0.3}
    async with job(monkeypatch, replicas=3, health=health, **refit) as on:
        on.fleet.max_losses = 1000

        async def faults() -> None:
            while True:
                await asyncio.sleep(random.uniform(0, 0.05))
                number, kind = random.randrange(2), random.choice(("crash", "refuse", "hang"))  # one survives
                method = random.choice(
                    ("load_weights", "reset_caches", "set_epoch", "pause", "resume", "ping")
                )
                if kind == "crash" and number in on.actors.engines:
                    on.actors.crash(number)
                elif kind == "refuse":
                    on.actors.refuse[number, random.choice(("load_weights", "reset_caches"))] = 1
                elif kind == "hang":
                    on.actors.hang[number, method] = 1

        async def trajectory(name: str) -> list[Answer]:
            return [(await on.turn(name, random.randrange(1, 30)))[1] for _ in range(8)]

        breaking = asyncio.create_task(faults())
        trajectories = asyncio.gather(*(trajectory(f"t{number}") for number in range(12)))
        refits = 0
        while not trajectories.done():
            await asyncio.sleep(0.1)
            refits += 1
            assert (await on.refit(f"weights {refits}")).epoch == refits
        breaking.cancel()
        answers = [each for many in await trajectories for each in many]
        assert len(answers) == 96
        for each in answers:
            assert set(each.tokens) <= set(range(each.epochs[0], each.epochs[1] + 1))
        await asyncio.sleep(0.3)
        await on.until_serving(3)
        assert {engine.weights for engine in on.actors.engines.values()} == {f"weights {refits}"}
