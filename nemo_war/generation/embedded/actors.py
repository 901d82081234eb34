"""Replica actors: started, asked, stopped, and put an end to where they do not stop.

A replica that died, or whose engine did, or that does not answer in time, is *lost*: one
error says so, whichever way it showed. Its processes are known from the start on, since
what outlives its parent cannot be found through it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import psutil
import ray

from nemo_war.generation.embedded import shared_memory
from nemo_war.generation.embedded.engine import EngineSpec, cores_of, process_environment, temporary_files_in
from nemo_war.generation.embedded.replica import EngineLostError

_START_TIMEOUT_S = 900.0
"""A cold start with compilation takes two minutes on one core; a slow machine may take several times that."""
_STOP_TIMEOUT_S = 20.0


class ReplicaLostError(Exception):
    """The replica is gone or does not answer; what it ran has to run elsewhere.

    Attributes:
        reason: what it did, to go on from "replica 3".
    """

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"replica {number} {reason}")
        self.reason = reason


class Actors:
    """The actors of a fleet, by number."""

    def __init__(self, spec: EngineSpec, cpus_per_replica: int, replica_class: type) -> None:
        """Start none yet.

        Args:
            spec: of every engine.
            cpus_per_replica: cores that each computes on.
            replica_class: what each actor runs.
        """
        self._spec = spec
        self._cpus = cpus_per_replica
        self._class = ray.remote(replica_class)
        self._handles: dict[int, Any] = {}
        self._up: set[int] = set()
        self._processes: dict[int, set[psutil.Process]] = {}
        self._queues: dict[int, set[Path]] = {}
        self._folders: dict[int, Path] = {}

    async def start(self, number: int) -> dict[str, Any]:
        """Start an actor and its engine; returns the engine's facts, see `Replica.start`.

        Raises:
            RuntimeError: the engine did not start as configured.
            ReplicaLostError: the actor died.
        """
        folder = self._folders[number] = Path(tempfile.mkdtemp(prefix=f"nemo-war-replica-{number}-"))
        cores = cores_of(number, self._cpus)
        environment = process_environment(cores, self._spec.ranks) | temporary_files_in(folder)
        self._handles[number] = self._class.options(
            num_cpus=0, max_concurrency=1000, runtime_env={"env_vars": environment}
        ).remote(number, self._spec)
        pid = await self._ask(number, "process", timeout_s=_START_TIMEOUT_S)
        try:
            actor = psutil.Process(pid)
        except psutil.NoSuchProcess:
            raise ReplicaLostError(number, "died") from None
        self._processes[number] = {actor}
        facts = await self._ask(number, "start", timeout_s=_START_TIMEOUT_S)
        self._processes[number] |= _family([actor])
        self._queues[number] = shared_memory.mapped(self._processes[number])
        self._up.add(number)
        return facts

    async def ask(self, number: int, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method of a replica; a cancelled call is cancelled there, too.

        Raises:
            ReplicaLostError: it has not started, died meanwhile, or did not answer in time.
            Exception: whatever else the method raised.
        """
        if number not in self._up:
            raise ReplicaLostError(number, "is not running")
        return await self._ask(number, method, *arguments, timeout_s=timeout_s)

    async def _ask(self, number: int, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """The same for one that starts."""
        reference = getattr(self._handles[number], method).remote(*arguments)
        try:
            async with asyncio.timeout(timeout_s):
                return await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except TimeoutError:
            ray.cancel(reference)
            raise ReplicaLostError(number, f"did not {method} within {timeout_s:g} s") from None
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if isinstance(cause, EngineLostError):
                raise ReplicaLostError(number, f"lost its engine: {cause}") from None
            raise cause from None
        except ray.exceptions.RayActorError:
            raise ReplicaLostError(number, "died") from None

    async def stop(self) -> None:
        """Shut every engine down and leave no process behind; may be called twice."""
        numbers = list(self._handles)
        stopping = [self.ask(number, "stop", timeout_s=_STOP_TIMEOUT_S) for number in numbers]
        await asyncio.gather(*stopping, return_exceptions=True)
        await asyncio.gather(*(self.kill(number, patience_s=5.0) for number in numbers))

    async def kill(self, number: int, patience_s: float = 0.0) -> None:
        """End a replica's processes, whatever state they are in.

        Args:
            number: of the replica.
            patience_s: time to go by themselves, where they were told to.
        """
        self._up.discard(number)
        handle = self._handles.pop(number, None)
        processes = _family(self._processes.pop(number, ()))  # before their parent is gone
        if handle is not None:
            ray.kill(handle)
        await _end(processes, patience_s)
        shared_memory.remove(self._queues.pop(number, set()) | shared_memory.registrations(processes))
        if (folder := self._folders.pop(number, None)) is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _end(processes: Collection[psutil.Process], patience_s: float) -> None:
    """Wait for processes to go; kill those that do not."""
    _, left = await asyncio.to_thread(psutil.wait_procs, processes, patience_s)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _family(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    """These processes and all that they started and that is still theirs."""
    everyone = set(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            everyone |= set(process.children(recursive=True))
    return everyone
