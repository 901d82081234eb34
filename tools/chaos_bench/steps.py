"""GRPO-like steps on a fleet: rollouts, a refit amid them, and a look at each answer."""

from __future__ import annotations

import asyncio
import time
from random import Random
from typing import Any

from nemo_war.generation.embedded.rollout import Rollouts, Trajectory
from nemo_war.generation.embedded.weights import share_weights
from nemo_war.generation.scheduling.actor import RayLink
from nemo_war.routing.options import Options
from nemo_war.routing.workload_aware import WorkloadAware
from nemo_war.telemetry.records import ExchangeRecord, OutageRecord, Pass
from tools.chaos_bench.engines import Engines
from tools.chaos_bench.fleet import ObservedFleet
from tools.chaos_bench.freshness import foreign, misdated, stale
from tools.chaos_bench.probes import Probes
from tools.chaos_bench.result import Result
from tools.chaos_bench.scene import Scene
from tools.chaos_bench.witness import Answered, Witness, misread
from tools.chaos_bench.workload import Workload

_WHICH = Pass("war", "live")


class Steps:
    """One step after the other. What is wrong with an answer goes into the result.

    Attributes:
        link, dispatcher: the ways to the scheduler.
    """

    def __init__(
        self,
        fleet: ObservedFleet,
        engines: Engines,
        scene: Scene,
        witness: Witness,
        result: Result,
        seed: int,
    ) -> None:
        self._scene = scene
        self._fleet, self._engines, self._witness, self._result = fleet, engines, witness, result
        self._workload = Workload(engines.sizes, seed)
        self._draw = Random(f"steps {seed}")
        policy = WorkloadAware(Options(block_tokens=engines.spec.engine["block_size"]))
        self.link = RayLink(policy)
        self.dispatcher = fleet.shared_dispatcher(self.link, engines.patience)
        self._rollouts = Rollouts(fleet, self.dispatcher, self._on_record, time.monotonic)
        self._probes = Probes(fleet)

    def _on_record(self, record: Any) -> None:
        if isinstance(record, ExchangeRecord):
            self._result.exchanges += 1
            self._scene.exchanged(record.failed > 0)
        elif isinstance(record, OutageRecord):
            self._result.fallbacks += record.fallbacks

    async def step(self) -> None:
        """Rollouts, and a refit when a part of them is over, as where the trainer does not wait for all.

        Raises:
            RefitError: the fleet serves no more.
        """
        starts = self._workload.step(self._result.steps)
        left, enough = self._draw.randint(len(starts) // 4, len(starts)), asyncio.Event()

        def on_done() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                enough.set()

        rolling = asyncio.create_task(self._rollouts.run(_WHICH, self._result.steps, starts, on_done))
        waiting = asyncio.create_task(enough.wait())
        try:
            await asyncio.wait({rolling, waiting}, return_when=asyncio.FIRST_COMPLETED)
            await self._look()
            await self._refit()
            trajectories, _ = await rolling
        finally:
            for task in (rolling, waiting):
                task.cancel()
            await asyncio.gather(rolling, waiting, return_exceptions=True)
        await self._look()
        for trajectory in trajectories:
            self._judge(trajectory)
        self._result.steps += 1

    async def _look(self) -> None:
        """Where tokens do not tell which policy they are of, ask replicas what does."""
        if self._engines.model is None:
            await self._probes.look()
            self._result.probed = self._probes.answers
            self._result.stale += self._probes.take()

    async def _refit(self) -> None:
        outcome = await self._fleet.refit(share_weights(self._engines.policy(self._fleet.epoch + 1)))
        self._result.refits += 1
        self._result.left_behind += outcome.fenced

    def _judge(self, trajectory: Trajectory) -> None:
        answers = self._witness.take(trajectory.name)
        if wrong := misread(trajectory, answers):
            self._result.duplicated.append(wrong)
        for answered in answers:
            began, ended = answered.answer.epochs
            self._result.mixed += began != ended
            self._judge_answer(answered)

    def _judge_answer(self, answered: Answered) -> None:
        """Stamps first: without them nobody knows what the tokens should be of."""
        result, model = self._result, self._engines.model
        wrong = misdated(answered, result.in_flight == "pause")
        if model is not None and not wrong:
            wrong = stale(answered, model)
        if wrong:
            result.stale.append(wrong)
        elif model is not None and (wrong := foreign(answered, model)):
            result.duplicated.append(wrong)
