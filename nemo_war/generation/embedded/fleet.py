"""A fleet: the replicas of one mode, their placement and their refits."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from nemo_war.config import RefitConfig
from nemo_war.generation.embedded.engine import EngineSpec, cores_of, process_environment
from nemo_war.generation.embedded.replica import Replica
from nemo_war.generation.embedded.turn import Answer, Turn
from nemo_war.generation.refit import Phase, RefitCycle, RefitError
from nemo_war.routing.dispatcher import Dispatcher
from nemo_war.routing.facts import Outcome, ReplicaFacts, TurnFacts
from nemo_war.routing.policy import Policy
from nemo_war.routing.scheduler import Scheduler

_START_TIMEOUT_S = 900.0
"""A cold start with compilation takes two minutes on one core; a slow machine may take several times that."""
_STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Weights:
    """One policy's weights in Ray's object store: one copy per node, however many replicas.

    Attributes:
        reference: object reference of a [bytes] uint8 array, a safetensors file.
        digest: blake2b of those bytes, as every replica must report it.
        size: in bytes.
    """

    reference: Any
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class RefitOutcome:
    """What a completed refit did; see `telemetry.records.RefitRecord`."""

    epoch: int
    replicas: int
    kv_reset_ok: bool
    seconds: float
    in_flight: int


def share_weights(blob: bytes) -> Weights:
    """Put a safetensors file into the object store, once."""
    return Weights(ray.put(np.frombuffer(blob, dtype=np.uint8)), hashlib.blake2b(blob).hexdigest(), len(blob))


class Fleet:
    """Replicas behind one scheduler.

    One event loop drives it. `generate` may be called many times at once; `refit`
    holds new turns back until it is over.
    """

    replica_class: type = Replica
    """What each actor runs; a test may put a misbehaving one here."""

    def __init__(self, spec: EngineSpec, replicas: int, cpus_per_replica: int, refit: RefitConfig) -> None:
        self.spec = spec
        self._cpus = cpus_per_replica
        self._numbers = range(replicas)
        self._actors: dict[int, Any] = {}
        self._processes: set[int] = set()
        self._facts = {number: ReplicaFacts(number) for number in self._numbers}
        self._dispatchers: weakref.WeakSet[Dispatcher] = weakref.WeakSet()
        self._changed = asyncio.Condition()
        self._cycle = RefitCycle(
            self._numbers,
            in_flight=refit.in_flight,
            quiet_timeout_s=refit.drain_timeout_s,
            update_timeout_s=refit.update_timeout_s,
            clock=time.monotonic,
        )

    @property
    def size(self) -> int:
        """Number of replicas."""
        return len(self._numbers)

    @property
    def epoch(self) -> int:
        """Policy epoch that new turns are generated under."""
        return self._cycle.epoch

    async def start(self, on_ready: Callable[[int], None] = lambda number: None) -> None:
        """Start all engines in parallel; `on_ready` is told of each.

        Raises:
            RuntimeError: one did not start; the others are stopped again.
        """
        actor = ray.remote(self.replica_class)
        for number in self._numbers:
            environment = process_environment(cores_of(number, self._cpus), self.spec.ranks)
            self._actors[number] = actor.options(
                num_cpus=0, max_concurrency=1000, runtime_env={"env_vars": environment}
            ).remote(number, self.spec)

        async def start_one(number: int) -> None:
            facts = await asyncio.wait_for(self.ask_one(number, "start"), _START_TIMEOUT_S)
            self._processes |= {facts["pid"], facts["parent"], facts["actor"]}
            self._facts[number] = ReplicaFacts(
                number,
                kv_tokens=facts["kv_tokens"],
                step_time=self.spec.step_time(),
                speculates=self.spec.speculates,
            )
            on_ready(number)

        try:
            await asyncio.gather(*map(start_one, self._numbers))
        except BaseException:
            await self.stop()
            raise

    def dispatcher(self, policy: Policy) -> Dispatcher:
        """A way to place turns on this fleet by a policy; it holds them back while a refit runs."""
        dispatcher = Dispatcher(Scheduler(policy), self._replicas, time.monotonic)
        self._dispatchers.add(dispatcher)
        return dispatcher

    async def generate(self, turn: Turn, dispatcher: Dispatcher) -> tuple[int, Answer]:
        """Place a turn and generate it.

        Returns:
            The replica that served, and its answer.
        """
        self._raise_if_failed()
        prompt = np.array(turn.prompt, dtype=np.int32)
        facts = TurnFacts(turn.metadata, len(turn.prompt), turn.max_new_tokens, prompt)
        placement = await dispatcher.place(facts)
        outcome = None
        try:
            metadata = replace(turn.metadata, critical=placement.critical, remaining=placement.remaining)
            answer = await self._ask_for(replace(turn, metadata=metadata), placement.replica)
            outcome = Outcome(len(answer.tokens), answer.cached_tokens)
            return placement.replica, answer
        finally:
            dispatcher.finish(placement.ticket, outcome)
            async with self._changed:
                self._changed.notify_all()

    async def _ask_for(self, turn: Turn, replica: int) -> Answer:
        reference = self._actors[replica].generate.remote(turn)
        try:
            return await _answer(reference)
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise

    def _running(self, replica: int) -> int:
        """Turns placed there, counted from the decision on: a refit must not overlook one on its way."""
        return sum(dispatcher.scheduler.running_on(replica) for dispatcher in self._dispatchers)

    def _replicas(self) -> list[ReplicaFacts] | None:
        return list(self._facts.values()) if self._cycle.admits else None

    async def refit(self, weights: Weights) -> RefitOutcome:
        """Give every replica these weights, and make the KV of the old ones unreachable.

        Raises:
            RefitError: a replica did not finish, load or reset in time, or says it
                failed to. The fleet serves no more.
        """
        started, cycle = time.monotonic(), self._cycle
        running = sum(map(self._running, self._numbers))
        cycle.begin(weights.digest)
        paused = cycle.phase is Phase.PAUSING
        await self._everywhere(self._pause if paused else self._drain)
        await self._everywhere(lambda number: self._update(number, weights))
        await self._everywhere(self._verify)
        await self.ask("set_epoch", cycle.epoch)
        if paused:
            await self.ask("resume")
        for dispatcher in self._dispatchers:
            dispatcher.pump()
        return RefitOutcome(cycle.epoch, self.size, True, time.monotonic() - started, running)

    async def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every replica; answers in order of replica."""
        return list(
            await asyncio.gather(*(self.ask_one(number, method, *arguments) for number in self._numbers))
        )

    async def ask_one(self, number: int, method: str, *arguments: Any) -> Any:
        """Call a method of one replica."""
        return await _answer(getattr(self._actors[number], method).remote(*arguments))

    async def commit(self, lengths: Mapping[int, dict[str, int]]) -> None:
        """Tell each replica the final lengths, in tokens, of the trajectories it served."""
        await asyncio.gather(*(self.ask_one(number, "commit", each) for number, each in lengths.items()))

    async def stop(self) -> None:
        """Shut every engine down and leave no process behind; may be called twice."""
        actors, self._actors = self._actors, {}
        stopping = [
            asyncio.wait_for(_answer(actor.stop.remote()), _STOP_TIMEOUT_S) for actor in actors.values()
        ]
        await asyncio.gather(*stopping, return_exceptions=True)
        for actor in actors.values():
            ray.kill(actor)
        await _end(self._processes)

    async def _everywhere(self, act: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Run one phase on all replicas; whatever goes wrong fails the cycle."""
        cycle = self._cycle
        tasks = [asyncio.create_task(act(number)) for number in self._numbers]
        try:
            while pending := [task for task in tasks if not task.done()]:
                await asyncio.wait(pending, timeout=0.2, return_when=asyncio.FIRST_EXCEPTION)
                cycle.check_deadline()
                if cycle.phase is Phase.FAILED:
                    break
                if failed := [task.exception() for task in tasks if task.done() and task.exception()]:
                    raise failed[0]  # type: ignore[misc]
        except Exception as error:
            cycle.fail(f"a replica failed while {cycle.phase}: {_first_line(error)}")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if failure := self._failure():
            for dispatcher in self._dispatchers:
                dispatcher.fail(failure)
            raise failure

    async def _drain(self, number: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._running(number))
        self._cycle.quiet(number)

    async def _pause(self, number: int) -> None:
        await self.ask_one(number, "pause")
        self._cycle.quiet(number)

    async def _update(self, number: int, weights: Weights) -> None:
        report = await self.ask_one(number, "load_weights", weights.reference)
        self._cycle.updated(number, report["digest"])

    async def _verify(self, number: int) -> None:
        self._cycle.verified(number, kv_reset=await self.ask_one(number, "reset_caches"))

    def _failure(self) -> RefitError | None:
        if self._cycle.phase is not Phase.FAILED:
            return None
        return RefitError(f"refit to epoch {self._cycle.epoch + 1} failed: {self._cycle.reason}")

    def _raise_if_failed(self) -> None:
        if failure := self._failure():
            raise failure


async def _answer(reference: Any) -> Any:
    """A Ray call's result; the actor's own exception instead of Ray's wrapper."""
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from None


async def _end(processes: Iterable[int], patience_s: float = 5.0) -> None:
    """Wait for processes to go; kill those that do not."""
    deadline = time.monotonic() + patience_s
    left = {process for process in processes if _alive(process)}
    while left and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        left = {process for process in left if _alive(process)}
    for process in left:
        os.kill(process, signal.SIGKILL)


def _alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
