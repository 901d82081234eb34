"""WAR's backend for NeMo-RL on NeMo-RL's double: real scheduler, no Ray, no engine."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from nemo_war.generation.scheduling.scheduler import SharedScheduler
from tests.double import workers
from tests.double.behaviours import answers, batch, configuration

__all__ = [
    "ALONE",
    "PATCHED",
    "LocalLink",
    "answers",
    "batch",
    "configuration",
    "generation",
    "undone",
    "until",
]

ALONE = {"history": {"exchange": {"when": "off"}}}
"""Replicas tell each other nothing, so that it does not depend on time what their engines are asked."""
WAR = {"routing": {"policy": "sticky"}, "speculative": {"max_draft_tokens": 8} | ALONE}


PATCHED = [
    "nemo_rl.algorithms.distillation",
    "nemo_rl.algorithms.grpo",
    "nemo_rl.algorithms.grpo_sync",
    "nemo_rl.algorithms.ppo",
    "nemo_rl.algorithms.single_controller_utils.setup",
    "nemo_rl.environments.nemo_gym",
    "nemo_rl.evals.eval",
    "nemo_rl.models.generation.vllm",
    "nemo_rl.models.generation.vllm.vllm_generation",
    "nemo_rl.utils.checkpoint",
    "nemo_rl.utils.logger",
    "nemo_rl.utils.venvs",
]
"""Modules in which names are bound anew, to be imported before that is to be undone."""


class LocalLink:
    """The way to a scheduler in the same loop.

    Attributes:
        asked: calls, by method and arguments, without those that ask whether it is there.
    """

    def __init__(self, policy: Any, name: str | None = None) -> None:
        self.scheduler = SharedScheduler(policy)
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self.loop = asyncio.get_running_loop()

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        if method != "ping":
            self.asked.append((method, arguments))
        return asyncio.ensure_future(getattr(self.scheduler, method)(*arguments))

    async def restart(self) -> None:
        raise AssertionError("it never went away")

    async def stop(self) -> None:
        pass

    def idle(self) -> bool:
        """Whether no turn waits or runs in the scheduler's books."""
        scheduler = self.scheduler.scheduler
        return self.scheduler.check_integrity() and not (scheduler.waiting or scheduler.running)


def until(true: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def undone(patch: pytest.MonkeyPatch) -> None:
    """Have `seams.install` undone with the patch: it binds names anew in NeMo-RL's modules."""
    from nemo_rl.distributed import ray_actor_environment_registry as registry

    for name, module in list(sys.modules.items()):
        if name.startswith("nemo_rl."):
            for key, value in list(vars(module).items()):
                if not key.startswith("__"):
                    patch.setattr(module, key, value)
    patch.setattr(registry, "ACTOR_ENVIRONMENT_REGISTRY", dict(registry.ACTOR_ENVIRONMENT_REGISTRY))


@contextmanager
def generation(
    asynchronous: bool = True, gpus: int = 2, war: Any = WAR, options: Any = None, **changes: Any
) -> Iterator[Any]:
    """A generation as an algorithm makes it, with `war` in its configuration.

    `links` of it are the ways to schedulers that were made, `engines` the leaders' engines.
    """
    from nemo_war.generation.nemo_rl import generation as module
    from nemo_war.generation.nemo_rl import seams

    for name in PATCHED:
        importlib.import_module(name)

    links: list[LocalLink] = []

    def link(policy: Any, name: str) -> LocalLink:
        links.append(LocalLink(policy, name))
        return links[-1]

    with pytest.MonkeyPatch.context() as patch:
        undone(patch)
        patch.setattr(ray, "get", workers.get)
        patch.setattr(ray, "cancel", workers.cancel)
        patch.setattr(ray, "put", lambda value: value)
        patch.setattr(module, "RayLink", link)
        seams.install()
        from nemo_rl.models.generation.vllm import VllmGeneration

        config = configuration(asynchronous, **changes)
        if war is not None:
            config["war"] = war
        cluster = SimpleNamespace(world_size=lambda: gpus)
        made = VllmGeneration(cluster=cluster, config=config, **(options or {}))
        group = made.worker_group
        leaders = [group.workers[group.get_dp_leader_worker_idx(shard)] for shard in range(group.dp_size)]
        made.links = links
        made.engines = [leader.actor.llm for leader in leaders]
        try:
            yield made
        finally:
            made.shutdown()
