"""A fleet: the replicas of one mode, their placement, their refits, and what becomes of lost ones.

A turn that its replica did not finish, as it died, hung or was fenced off, is generated
again on another one: its prompt is all that it needs, and nothing of an unfinished answer
is kept. A lost replica is started anew; before it serves, it gets the weights of the
policy epoch and says that its caches are empty, as in any refit.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from nemo_war.config import ExchangeConfig, HealthConfig, RefitConfig
from nemo_war.generation.embedded.actors import Actors, ReplicaLostError
from nemo_war.generation.embedded.engine import EngineSpec
from nemo_war.generation.embedded.refitting import Refitting
from nemo_war.generation.embedded.replica import ABORTED, Replica
from nemo_war.generation.embedded.turn import Answer, Turn
from nemo_war.generation.embedded.watch import Watch
from nemo_war.generation.embedded.weights import Weights
from nemo_war.generation.history_exchange import HistoryExchange
from nemo_war.generation.refit import Phase, RefitCycle, RefitError, Stage, Transition
from nemo_war.generation.scheduling.dispatcher import SharedDispatcher
from nemo_war.generation.scheduling.heartbeat import Patience
from nemo_war.generation.scheduling.link import Link
from nemo_war.generation.self_check import deviants
from nemo_war.routing.dispatcher import Dispatcher, Placer
from nemo_war.routing.facts import Outcome, Placement, ReplicaFacts, TurnFacts
from nemo_war.routing.policy import Policy
from nemo_war.routing.scheduler import NoReplicaError, Scheduler

_TICK_S = 0.1
"""How often a refit looks for a replica to begin with, where all are lost."""
_START = "start"
"""Name of the weights that all replicas start with."""


@dataclass(frozen=True, slots=True)
class RefitOutcome:
    """What a completed refit did; see `telemetry.records.RefitRecord`."""

    epoch: int
    replicas: int
    kv_reset_ok: bool
    seconds: float
    in_flight: int
    fenced: int
    self_check_s: float


class Fleet:
    """Replicas behind one scheduler.

    One event loop drives it. `generate` may be called many times at once; `refit`
    holds new turns back until it is over.

    Attributes:
        exchange: what its replicas tell each other.
    """

    replica_class: type = Replica
    """What each actor runs; a test may put a misbehaving one here."""
    max_losses: int = 3
    """Replicas that one turn may be lost on: a request that kills engines must not kill them all."""

    def __init__(
        self,
        spec: EngineSpec,
        replicas: int,
        cpus_per_replica: int,
        refit: RefitConfig,
        health: HealthConfig | None = None,
        record: Callable[[Transition], None] = lambda transition: None,
        epoch: int = 0,
    ) -> None:
        """Start none yet.

        Args:
            spec: of every engine.
            replicas: how many.
            cpus_per_replica: cores that each computes on.
            refit: how weights change.
            health: when a replica counts as lost, and how often it is brought back.
            record: told of every transition of the refit cycle.
            epoch: policy epoch to start with, the count of refits of a run that goes on.
        """
        self.spec = spec
        self.retried = 0
        self._numbers = range(replicas)
        self._record = record
        self._facts = {number: ReplicaFacts(number, healthy=False) for number in self._numbers}
        self._dispatchers: weakref.WeakSet[Placer] = weakref.WeakSet()
        self._changed = asyncio.Condition()
        self._weights: Weights | None = None
        self._weights_change = asyncio.Lock()
        self._gone: dict[int, str] = {}
        self._refit_config, self._checking = refit, False
        self.exchange = HistoryExchange(_exchange_of(spec), self._numbers, self.ask_one, ray.put)
        self._cycle = RefitCycle(
            self._numbers,
            in_flight=refit.in_flight,
            on_failure=refit.on_failure,
            quiet_timeout_s=refit.drain_timeout_s,
            update_timeout_s=refit.update_timeout_s,
            clock=time.monotonic,
            digest=_START,
            epoch=epoch,
            record=self._on_transition,
        )
        self._actors = Actors(spec, cpus_per_replica, self.replica_class)
        self._refitting = Refitting(
            self._cycle, self._actors, self._running, self._changed, refit.update_timeout_s
        )
        self._watch = Watch(
            self._actors, health or HealthConfig(), self._cycle.fence, self._rejoin, self._give_up
        )

    @property
    def size(self) -> int:
        """Number of replicas, those that are lost included."""
        return len(self._numbers)

    @property
    def epoch(self) -> int:
        """Policy epoch that new turns are generated under."""
        return self._cycle.epoch

    @property
    def serving(self) -> list[int]:
        """Replicas that are given turns."""
        return [number for number in self._numbers if self._cycle.serves(number)]

    async def start(self, on_ready: Callable[[int], None] = lambda number: None) -> None:
        """Start all engines in parallel; `on_ready` is told of each.

        Raises:
            RuntimeError: one did not start; the others are stopped again.
        """

        async def start_one(number: int) -> None:
            facts = await self._actors.start(number)
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
        for number in self._numbers:
            self._watch.mind(number)

    def dispatcher(self, policy: Policy) -> Dispatcher:
        """A way to place turns on this fleet by a policy; it holds them back while a refit runs."""
        dispatcher = Dispatcher(Scheduler(policy), self._replicas, time.monotonic)
        self._dispatchers.add(dispatcher)
        return dispatcher

    def shared_dispatcher(self, link: Link, patience: Patience | None = None) -> SharedDispatcher:
        """The same, where the scheduler is elsewhere, as it must be for several processes to place turns."""
        dispatcher = SharedDispatcher(link, self._replicas, time.monotonic, patience)
        self._dispatchers.add(dispatcher)
        return dispatcher

    async def generate(self, turn: Turn, dispatcher: Placer) -> tuple[int, Answer]:
        """Place a turn and generate it; where its replica is lost or takes it back, once more.

        Returns:
            The replica that served, and its answer.

        Raises:
            ReplicaLostError: it was lost on as many replicas as a turn may be.
            RefitError, NoReplicaError: the fleet serves no more.
        """
        prompt, losses = np.array(turn.prompt, dtype=np.int32), 0
        while True:
            self._raise_if_failed()
            turn = replace(turn, metadata=replace(turn.metadata, epoch=self.epoch))
            placement = await dispatcher.place(
                TurnFacts(turn.metadata, len(turn.prompt), turn.max_new_tokens, prompt)
            )
            outcome = None
            self.exchange.placed(turn.metadata, placement.replica)
            try:
                answer = await self._ask_for(turn, placement)
                if answer.finish_reason != ABORTED:
                    self.exchange.finished(
                        turn.metadata, placement.replica, len(turn.prompt) + len(answer.tokens)
                    )
                    outcome = Outcome(len(answer.tokens), answer.cached_tokens)
                    return placement.replica, answer
            except ReplicaLostError as error:
                self._cycle.fence(placement.replica, error.reason)
                losses += 1
                if losses == self.max_losses:
                    raise
            finally:
                dispatcher.finish(placement.ticket, outcome)
                async with self._changed:
                    self._changed.notify_all()
            self.retried += 1

    async def _ask_for(self, turn: Turn, placement: Placement) -> Answer:
        """The replica's answer, unless it is fenced off before that."""
        metadata = replace(
            turn.metadata, epoch=self.epoch, critical=placement.critical, remaining=placement.remaining
        )
        replica = placement.replica
        answer = asyncio.ensure_future(
            self._actors.ask(replica, "generate", replace(turn, metadata=metadata))
        )
        fenced = asyncio.ensure_future(self._watch.fence(replica).wait())
        try:
            await asyncio.wait({answer, fenced}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ReplicaLostError(replica, "was fenced off")
            self._watch.answered(replica)
            return answer.result()
        finally:
            fenced.cancel()
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    def _running(self, replica: int) -> int:
        """Turns placed there, counted from the decision on: a refit must not overlook one on its way."""
        return sum(dispatcher.running_on(replica) for dispatcher in self._dispatchers)

    def _replicas(self) -> list[ReplicaFacts] | None:
        return list(self._facts.values()) if self._cycle.admits and not self._checking else None

    async def refit(self, weights: Weights) -> RefitOutcome:
        """Give every replica these weights, and make the KV of the old ones unreachable.

        Raises:
            RefitError: a replica did not finish, load or reset in time, or says it failed to, and the
                fleet does not go on without it (`refit.on_failure`); it serves no more.
        """
        started, cycle = time.monotonic(), self._cycle
        running = sum(map(self._running, self._numbers))
        while not await self._refit(weights):  # a replica may be on its way back
            await asyncio.sleep(_TICK_S)
        if failure := self._failure():
            for dispatcher in self._dispatchers:
                dispatcher.fail(failure)
            raise failure
        checked_s = await self._check()
        self._pump()
        serving = len(self.serving)
        return RefitOutcome(
            cycle.epoch,
            serving,
            True,
            time.monotonic() - started,
            running,
            self.size - serving,
            checked_s,
        )

    async def _check(self) -> float:
        """Fence off replicas that do not say what the others do; the seconds that took, 0 if not wanted.

        Raises:
            RefitError: there is one, and the fleet does not go on without (`refit.on_failure`).
        """
        if not self._refit_config.self_check:
            return 0.0
        started, self._checking = time.monotonic(), True
        try:
            found = deviants(await self.ask("probe"), self._refit_config.self_check_tolerance)
        finally:
            self._checking = False
        for number, reason in found.items():
            self._cycle.fence(number, reason)
        if found and self._refit_config.on_failure == "fail":
            reasons = "; ".join(f"replica {number} {reason}" for number, reason in found.items())
            raise RefitError(f"the self-check of epoch {self.epoch} failed: {reasons}")
        return time.monotonic() - started

    async def _refit(self, weights: Weights) -> bool:
        """Have the replicas that serve take the weights; False where none does."""
        async with self._weights_change:
            self._raise_if_failed()
            members = self.serving
            if members:
                self._weights = weights
                await self._refitting.run(weights, members)
        return bool(members)

    async def ask(self, method: str, *arguments: Any) -> dict[int, Any]:
        """Call a method of every replica that serves; answers by replica, without those that were lost."""
        answers: dict[int, Any] = {}

        async def ask_one(number: int) -> None:
            try:
                answers[number] = await self._actors.ask(number, method, *arguments)
            except ReplicaLostError as error:
                self._cycle.fence(number, error.reason)

        await asyncio.gather(*map(ask_one, self.serving))
        return dict(sorted(answers.items()))

    async def ask_one(self, number: int, method: str, *arguments: Any) -> Any:
        """Call a method of one replica.

        Raises:
            ReplicaLostError: it is lost.
        """
        return await self._actors.ask(number, method, *arguments)

    async def clear_history(self) -> None:
        """Empty all histories, for repeats that must not help each other."""
        await self.ask("clear_history")
        self.exchange.cleared(self.serving)

    async def commit(self, lengths: Mapping[int, dict[str, int]]) -> None:
        """Tell each replica the final lengths, in tokens, of the trajectories it served."""
        telling = [self._actors.ask(number, "commit", each) for number, each in lengths.items()]
        for outcome in await asyncio.gather(*telling, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, ReplicaLostError):
                raise outcome

    async def stop(self) -> None:
        """Shut every engine down and leave no process behind; may be called twice."""
        await self._watch.stop()
        await self._actors.stop()
        await asyncio.gather(*(dispatcher.stop() for dispatcher in self._dispatchers))

    async def _rejoin(self, number: int) -> bool:
        """Give a replica that is up again what the fleet has; not while a refit runs."""
        async with self._weights_change:
            if self._cycle.phase is not Phase.SERVING:
                return False
            await self._refitting.rejoin(number, self._weights)
        self._pump()
        serves = self._cycle.serves(number)
        if serves:
            await self.exchange.seed(number)
        return serves

    def _give_up(self, number: int, reason: str) -> None:
        """That replica will not be back; without any other the fleet serves no more."""
        self._gone[number] = f"replica {number} {reason}"
        if failure := self._failure():
            for dispatcher in self._dispatchers:
                dispatcher.fail(failure)

    def _on_transition(self, transition: Transition) -> None:
        """Keep what placement knows in step with the cycle."""
        self._record(transition)
        number = transition.replica
        if number is None:
            if not self._cycle.admits:  # else replicas may have to resume first
                self._pump()
        elif transition.after is Stage.FENCED:
            self._watch.fenced(number)
            self._facts[number] = replace(self._facts[number], healthy=False)
            self.exchange.lost(number)
            for dispatcher in self._dispatchers:
                dispatcher.lost(number)
        elif transition.after is Stage.SERVING:
            self._facts[number] = replace(self._facts[number], healthy=True)
            self._watch.mind(number)

    def _pump(self) -> None:
        for dispatcher in self._dispatchers:
            dispatcher.pump()

    def _failure(self) -> Exception | None:
        if self._cycle.phase is Phase.FAILED:
            return RefitError(f"refit to epoch {self._cycle.epoch + 1} failed: {self._cycle.reason}")
        if len(self._gone) == self.size:
            return NoReplicaError(f"no replica is left: {'; '.join(self._gone.values())}")
        return None

    def _raise_if_failed(self) -> None:
        if failure := self._failure():
            raise failure


def _exchange_of(spec: EngineSpec) -> ExchangeConfig:
    """Replicas without drafter have nothing to tell."""
    if spec.war is None or not spec.speculates:
        return ExchangeConfig(when="off")
    return spec.war.speculative.history.exchange
