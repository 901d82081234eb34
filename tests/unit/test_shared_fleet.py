"""A fleet whose turns are placed by a scheduler elsewhere, while replicas and that scheduler fail."""

from __future__ import annotations

import asyncio
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from fake_actors import FakeActors
from fake_link import FakeLink
from virtual_time import now, run

from nemo_war.config import HealthConfig, RefitConfig
from nemo_war.generation.embedded import fleet as fleets
from nemo_war.generation.embedded.actors import ReplicaLostError
from nemo_war.generation.embedded.engine import EngineSpec
from nemo_war.generation.embedded.fleet import Fleet
from nemo_war.generation.embedded.turn import Answer, Turn
from nemo_war.generation.embedded.weights import Weights
from nemo_war.metadata import TurnMetadata
from nemo_war.routing.workload_aware import WorkloadAware

HEALTH = HealthConfig(probe_interval_s=0.2, probe_timeout_s=1, max_restarts=1000)


class Job:
    """A fleet of fakes, its scheduler, and who generates on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, in_flight: str, seed: int) -> None:
        monkeypatch.setattr(fleets, "Actors", FakeActors)
        monkeypatch.setattr(fleets, "time", SimpleNamespace(monotonic=now))
        refit: dict[str, Any] = {"in_flight": in_flight, "on_failure": "continue"}
        settings = RefitConfig(drain_timeout_s=3, update_timeout_s=3, **refit)
        self.fleet = Fleet(EngineSpec("m", {}, None), 3, 1, settings, HEALTH)
        self.actors: FakeActors = self.fleet._actors  # type: ignore[assignment]
        self.link = FakeLink(WorkloadAware, now, seed)
        self.dispatcher = self.fleet.shared_dispatcher(self.link)
        self.random = Random(seed)

    async def faults(self) -> None:
        random = self.random
        while True:
            await asyncio.sleep(random.uniform(0, 0.5))
            number = random.randrange(2)  # one survives
            match random.choice(("crash", "refuse", "hang", "kill", "freeze", "thaw")):
                case "crash":
                    if number in self.actors.engines:
                        self.actors.crash(number)
                case "refuse":
                    self.actors.refuse[number, random.choice(("load_weights", "reset_caches"))] = 1
                case "hang":
                    method = random.choice(("load_weights", "set_epoch", "pause", "resume", "ping"))
                    self.actors.hang[number, method] = 1
                case "kill":
                    self.link.restart_s = random.uniform(0, 3)
                    self.link.kill()
                case "freeze":
                    self.link.freeze()
                case "thaw":
                    self.link.thaw()

    async def trajectory(self, name: str) -> list[Answer | ReplicaLostError]:
        answers: list[Answer | ReplicaLostError] = []
        for number in range(20):
            turn = Turn((1, 2, 3), TurnMetadata(name, name, number), self.random.randrange(1, 200))
            try:
                answers.append((await self.fleet.generate(turn, self.dispatcher))[1])
            except ReplicaLostError as error:  # three faults on one turn
                answers.append(error)
            await asyncio.sleep(self.random.uniform(0, 0.5))
        self.dispatcher.end(name)
        return answers


@pytest.mark.parametrize("in_flight", ["drain", "pause", "abort"])
@pytest.mark.parametrize("seed", range(4))
def test_every_turn_is_answered_once_under_the_weights_it_says_and_refits_overlook_none(
    monkeypatch: pytest.MonkeyPatch, seed: int, in_flight: str
) -> None:
    async def whole() -> None:
        job = Job(monkeypatch, in_flight, seed)
        await job.fleet.start()
        breaking = asyncio.create_task(job.faults())
        trajectories = asyncio.gather(*(job.trajectory(f"t{number}") for number in range(12)))
        refits = 0
        while not trajectories.done():
            await asyncio.sleep(0.7)
            refits += 1
            weights = Weights(f"weights {refits}", f"weights {refits}", 0)
            assert (await job.fleet.refit(weights)).epoch == refits
        breaking.cancel()
        answers = [each for many in await trajectories for each in many]
        assert len(answers) == 240
        for each in answers:
            if isinstance(each, Answer):
                assert set(each.tokens) <= set(range(each.epochs[0], each.epochs[1] + 1))
        assert not any(engine.stale for engine in job.actors.engines.values())
        job.link.thaw()
        await asyncio.sleep(60)
        assert job.dispatcher.take_outages().outages > 0
        assert not job.dispatcher.out
        assert job.link.scheduler is not None
        assert job.link.scheduler.scheduler.running == job.link.scheduler.scheduler.waiting == 0
        assert job.link.scheduler.check_integrity()
        assert not any(map(job.dispatcher.running_on, range(3)))
        await job.fleet.stop()

    run(whole())


def test_the_scheduler_hears_of_a_refit_and_of_its_end_without_any_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def whole() -> None:
        job = Job(monkeypatch, "drain", 0)
        await job.fleet.start()
        await job.fleet.generate(Turn((1,), TurnMetadata("t", "t"), 1), job.dispatcher)
        scheduler = job.link.scheduler
        assert scheduler is not None
        assert scheduler._replicas is not None
        await asyncio.sleep(5)  # nobody asks any more
        assert not job.dispatcher._heartbeat.asks
        job.actors.hang[0, "load_weights"] = 1
        refit = asyncio.create_task(job.fleet.refit(Weights("one", "one", 0)))
        await asyncio.sleep(1)
        assert scheduler._replicas is None
        await refit
        await asyncio.sleep(0.1)
        assert scheduler._replicas is not None
        assert [facts.healthy for facts in scheduler._replicas][1:] == [True, True]
        await job.fleet.stop()

    run(whole())
