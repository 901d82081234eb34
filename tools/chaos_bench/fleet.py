"""The real fleet with windows in it. This is the only place that looks inside."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import psutil

from nemo_war.config import HealthConfig, RefitConfig
from nemo_war.generation.embedded.engine import EngineSpec
from nemo_war.generation.embedded.fleet import Fleet
from nemo_war.generation.embedded.turn import Answer, Turn
from nemo_war.generation.refit import Phase, Stage
from nemo_war.routing.dispatcher import Placer
from nemo_war.routing.facts import Placement
from tools.chaos_bench.scene import Scene
from tools.chaos_bench.witness import Answered, Witness


class ObservedFleet(Fleet):
    """Does what a fleet does, and lets a witness and a scene know.

    Attributes:
        exchanging: calls that carry history from or to a replica, by its number.
    """

    max_losses = 1_000_000
    """Faults strike at random, so that some turn meets many; the limit has a test of its own."""

    def __init__(
        self,
        spec: EngineSpec,
        replicas: int,
        refit: RefitConfig,
        health: HealthConfig,
        replica_class: type,
        scene: Scene,
        witness: Witness,
    ) -> None:
        self.replica_class = replica_class
        self.exchanging: Counter[int] = Counter()
        self._scene, self._witness = scene, witness
        super().__init__(spec, replicas, 1, refit, health, scene.record)

    async def generate(self, turn: Turn, dispatcher: Placer) -> tuple[int, Answer]:
        began = self.epoch
        self._witness.asks(turn)
        try:
            replica, answer = await super().generate(turn, dispatcher)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._witness.loses(turn, error)
            raise
        self._witness.answers(Answered(turn, replica, answer, began, self.epoch))
        self._scene.changed()
        return replica, answer

    async def ask_one(self, number: int, method: str, *arguments: Any) -> Any:
        if method not in ("export_history", "import_history"):
            return await super().ask_one(number, method, *arguments)
        self.exchanging[number] += 1
        self._scene.changed()
        try:
            return await super().ask_one(number, method, *arguments)
        finally:
            self.exchanging[number] -= 1

    async def _ask_for(self, turn: Turn, placement: Placement) -> Answer:
        self._witness.tries(turn)
        self._scene.changed()
        return await super()._ask_for(turn, placement)

    def runs_turns(self, number: int) -> bool:
        """Whether a turn is placed on a replica that serves."""
        return self._cycle.serves(number) and self._running(number) > 0

    def serves(self, number: int) -> bool:
        """Whether the replica is given turns, or will be when the refit is over."""
        return self.stage(number) is not Stage.FENCED and self._cycle.epoch_of(number) == self.epoch

    def stage(self, number: int) -> Stage:
        """Where a replica stands."""
        return self._cycle.stage_of(number)

    def in_refit(self, number: int, stage: Stage) -> bool:
        """Whether a refit has a replica in a stage."""
        return self._cycle.phase is not Phase.SERVING and self.stage(number) is stage

    def rejoins(self, number: int) -> bool:
        """Whether a replica that was fenced off is about to get the weights of the epoch."""
        return self._cycle.phase is Phase.SERVING and self.stage(number) is Stage.UPDATING

    def processes(self, number: int, with_engine: bool = False) -> list[psutil.Process]:
        """The actor of a replica, and its engine's processes if those are wanted."""
        known = self._actors._processes.get(number, set())
        found = sorted(known, key=lambda process: (process.create_time(), process.pid))
        return found[:1] + [each for each in found[1:] if with_engine and _command(each).startswith("VLLM")]

    def describe(self) -> str:
        """Where everything stands."""
        lines = [f"fleet: {self._cycle.phase}, epoch {self.epoch}, {self._cycle.reason or 'no failure'}"]
        for number in range(self.size):
            processes = [f"{each.pid} {_status(each)}" for each in self.processes(number)]
            lines.append(
                f"replica {number}: {self.stage(number)}, {self._running(number)} turns, "
                f"processes {processes}, {self._cycle.fenced.get(number, '')}"
            )
        lines += [f"the scheduler is out: {each.out}" for each in self._dispatchers]
        return "\n".join(lines)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return "gone"
