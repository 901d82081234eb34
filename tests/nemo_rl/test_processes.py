"""Copies of a generation in other processes, and workers that die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from nemo_rl.experience.failures import GenerationUnavailable
from nemo_rl.models.generation.fleet_health import (
    FleetHealthPolicy,
    GenerationFleetHealth,
    HealthyShardSelector,
)

from tests.nemo_rl import world

pytestmark = pytest.mark.usefixtures("ray_cluster")


@ray.remote
class Collector:
    """An actor that is given a generation, as NeMo-RL's trajectory collector is. It must not be garbage."""

    def __init__(self, generation: Any) -> None:
        self._generation = generation

    def ask(self, prompts: list[list[int]]) -> list[list[int]]:
        return [world.text(answer) for answer in world.answered(self._generation, prompts, greedy=True)]

    def scheduler(self) -> dict[str, Any]:
        return ray.get(ray.get_actor(self._generation._scheduler).statistics.remote())


@pytest.fixture(scope="module")
def made(model_folder: Path) -> Iterator[Any]:
    config = world.generation_config(model_folder, True, {"speculative": {"max_draft_tokens": 8}})
    with world.generation(config) as each:
        yield each


@pytest.fixture(scope="module")
def prompts(model_folder: Path) -> list[list[int]]:
    encode = world.tokenizer(model_folder).encode
    return [encode(f"Count on: {start}, {start + 1}, {start + 2}, ") for start in (1, 11, 101, 5)]


def test_a_copy_in_an_actor_asks_the_same_scheduler(made: Any, prompts: list[list[int]]) -> None:
    here = [world.text(answer) for answer in world.answered(made, prompts, greedy=True)]
    collector = Collector.remote(made)
    assert ray.get(collector.ask.remote(prompts)) == here
    assert ray.get(collector.scheduler.remote())["clients"] == 2
    ray.kill(collector)  # not collected as garbage, as NeMo-RL's generation shuts all down when it is
    assert [world.text(answer) for answer in world.answered(made, prompts, greedy=True)] == here


def test_a_killed_worker_is_an_error_of_nemo_rls_and_then_given_nothing(
    made: Any, prompts: list[list[int]]
) -> None:
    monitor = GenerationFleetHealth(shard_count=2, policy=FleetHealthPolicy(unhealthy_threshold=1))
    made.attach_fleet_health(monitor, HealthyShardSelector(monitor))
    victim = made.worker_group.workers[made.worker_group.get_dp_leader_worker_idx(0)]
    ray.kill(victim)
    failures = 0
    for _ in range(8):
        try:
            world.answered(made, prompts[:1])
        except GenerationUnavailable:
            failures += 1
    assert failures <= 1, "one turn finds out; the next ones go to the other replica"
    answers = world.answered(made, prompts)
    assert len(answers) == len(prompts)
    assert monitor.serving_shards() == ([1] if failures else [0, 1])
