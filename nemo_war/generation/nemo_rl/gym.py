"""NeMo-Gym is given our router's address in place of the workers' own, or of NeMo-RL's router.

Gym takes a session's URLs in turn, and NeMo-RL's router the least loaded: neither knows which
replica has a trajectory's KV.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from nemo_rl.distributed.virtual_cluster import _get_free_port_local, _get_node_ip_local
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_war.config import PolicyName
from nemo_war.generation.nemo_rl.gym_router import GymRouterActor, Learned

_fronts: dict[str, Any] = {}
"""Routers of this process by their URL, which live as long as somebody holds them."""


def routed(policy: PolicyName, spinup: Callable[..., Any]) -> Callable[..., Any]:
    """NeMo-RL's start of Gym, with a router of ours in front of the workers, unless there is one."""

    def spinup_nemo_gym_actor(env_configs: Any, base_urls: Sequence[str], *rest: Any, **options: Any) -> Any:
        if base_urls and not _fronts.keys() & set(base_urls):
            base_urls = [_start(policy, base_urls)]
        return spinup(env_configs, base_urls, *rest, **options)

    return spinup_nemo_gym_actor


def ours(policy: PolicyName, start: Callable[..., Any]) -> Callable[..., Any]:
    """The single controller's start of its router, which makes ours."""

    def start_generation_router(generation: Any, master_config: Any) -> Any:
        home = sys.modules[start.__module__]
        theirs = home.GenerationRouterActor
        home.GenerationRouterActor = _Routers(policy)  # type: ignore[attr-defined]
        try:
            router = start(generation, master_config)
        finally:
            home.GenerationRouterActor = theirs  # type: ignore[attr-defined]
        if router is not None:
            _fronts[ray.get(router.base_url.remote())] = router
        return router

    return start_generation_router


def take_learned() -> list[Learned]:
    """What replicas learned from turns that came by HTTP, since this was asked last."""
    return [each for router in _fronts.values() for each in _learned_by(router)]


def _learned_by(router: Any) -> list[Learned]:
    try:
        return ray.get(router.take_learned.remote())
    except ray.exceptions.RayError:  # Ray starts it again, and then it knows of none
        return []


class _Routers:
    """Stands where NeMo-RL has the actor class of its router, and makes ours."""

    def __init__(self, policy: PolicyName, options: Mapping[str, Any] | None = None) -> None:
        self._policy, self._options = policy, options or {}

    def options(self, **options: Any) -> _Routers:
        """As an actor class's."""
        return _Routers(self._policy, options)

    def remote(self, **arguments: Any) -> Any:
        """As an actor class's."""
        return GymRouterActor.options(**self._options).remote(policy=self._policy, **arguments)


def _start(policy: PolicyName, urls: Sequence[str]) -> str:
    """A router on this node; its URL."""
    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    place = {"host": _get_node_ip_local(), "port": _get_free_port_local()}
    router = _Routers(policy).options(scheduling_strategy=here).remote(backend_urls=list(urls), **place)
    url = ray.get(router.base_url.remote())
    _fronts[url] = router
    return url
