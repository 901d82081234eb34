"""A shared scheduler as a Ray actor, and the way to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any

import ray

from nemo_war.generation.scheduling.link import UnreachableError
from nemo_war.generation.scheduling.scheduler import SharedScheduler
from nemo_war.routing.policy import Policy

_CALLS = 100_000
"""Calls at a time. Each turn that waits is one, and if they used up all there are no `ping` would pass."""


class RayLink:
    """The way to the actor, which is started where there is none of this name.

    Ray starts it again when it dies. It ends with the process that started it.
    """

    def __init__(self, policy: Policy, name: str | None = None) -> None:
        """Start the actor, without waiting for it.

        Args:
            policy: of its scheduler; a fresh copy of it in each life.
            name: by which other processes of the job find it; None where they need not.
        """
        self._policy = policy
        self._name = name
        self._actor = self._start()

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """See `Link`."""
        try:
            _check_ray()
            return _answer(getattr(self._actor, method).remote(*arguments))
        except Exception as error:
            return _refusal(error)

    async def restart(self) -> None:
        """See `Link`. Ending the actor frees its name, whatever state its process is in."""
        await asyncio.to_thread(self._restart)

    async def stop(self) -> None:
        """See `Link`. One with a name may be of use to others."""
        if self._name is None:
            with contextlib.suppress(Exception):
                ray.kill(self._actor)

    def _start(self) -> Any:
        return (
            ray.remote(SharedScheduler)
            .options(
                name=self._name,
                get_if_exists=self._name is not None,
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=_CALLS,
            )
            .remote(self._policy)
        )

    def _restart(self) -> None:
        _check_ray()
        with contextlib.suppress(Exception):  # it is dead already
            ray.kill(self._actor)
        self._actor = self._start()


def _check_ray() -> None:
    """Ray would start a cluster of its own where there is none any more."""
    if not ray.is_initialized():
        raise UnreachableError("there is no Ray any more")


async def _answer(reference: Any) -> Any:
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    except ray.exceptions.RayError as error:
        raise UnreachableError(str(error)) from None


async def _refusal(error: Exception) -> Any:
    raise UnreachableError(str(error))
