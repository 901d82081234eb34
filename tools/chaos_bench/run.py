"""A run: steps go on until every fault of a plan was survived; then all is looked over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tools.chaos_bench import remains
from tools.chaos_bench.engines import Engines
from tools.chaos_bench.fleet import ObservedFleet
from tools.chaos_bench.injection import Injection, Survived
from tools.chaos_bench.kinds import InFlight, possible
from tools.chaos_bench.memory import Memory
from tools.chaos_bench.plan import drawn
from tools.chaos_bench.result import Result
from tools.chaos_bench.scene import Scene
from tools.chaos_bench.scheduler import SchedulerVictim
from tools.chaos_bench.steps import Steps
from tools.chaos_bench.victim import Victim
from tools.chaos_bench.watchdog import Watchdog
from tools.chaos_bench.witness import Witness

_LEAST_STEPS = 4
"""With few faults or none there is still something to look at."""
_START_S = 300.0
"""How much more patience it takes while replicas start: kernels may have to be compiled."""
_EVERY_S = 10.0
"""How often a line tells how far it is."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for.

    Attributes:
        faults: how many.
        seed: of the plan and of the work.
        in_flight: what a refit does to running turns.
        replicas: how many.
        folder: for orders and logs.
        kinds: of faults; all that are possible where none is named.
    """

    faults: int
    seed: int
    in_flight: InFlight
    replicas: int
    folder: Path
    kinds: Sequence[str] = ()


@dataclass
class Run:
    """One run, from the start of its engines to their end."""

    settings: Settings
    engines: Engines
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        settings, engines = self.settings, self.engines
        kinds = possible(engines.real, settings.in_flight)
        if settings.kinds:
            kinds = {name: kind for name, kind in kinds.items() if name in settings.kinds}
        self._plan = drawn(kinds, settings.faults, settings.replicas, engines.pace.delay_s, settings.seed)
        self._scene, self._witness, self._memory = Scene(), Witness(), Memory()
        self._shared = remains.SharedMemory(self.mark)
        self._describe: Callable[[], str] = str
        self._watchdog = Watchdog(
            engines.pace.patience_s + _START_S,
            lambda: self._scene.changes,
            lambda: self._describe(),
            self._kill_all,
            settings.folder / "hung.txt",
        )
        self._began = time.monotonic()
        self.result = Result(settings.seed, engines.real, settings.in_flight, settings.replicas)

    def __call__(self) -> Result:
        """Do it."""
        import ray

        self._make_folder()
        temporary = remains.TemporaryFolder()
        tempfile.tempdir = str(temporary.path)
        self._watchdog.start()
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", remains.MARK: self.mark}
        environment = self.engines.environment(self._orders) | {remains.MARK: self.mark}
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=self.engines.object_store_bytes,
            runtime_env={"env_vars": environment},
        )
        with contextlib.redirect_stdout(sys.stderr):  # Ray prints each process that dies to where results go
            try:
                asyncio.run(self._with_fleet())
            finally:
                ray.shutdown()
        self.result.orphans += remains.processes(self.mark) + self._shared.left() + temporary.left()
        tempfile.tempdir = None
        temporary.remove()
        self._watchdog.stop()
        return self.result

    @property
    def _orders(self) -> Path:
        return self.settings.folder / "orders"

    def _make_folder(self) -> None:
        """Nothing of an earlier run is left in it."""
        shutil.rmtree(self._orders, ignore_errors=True)
        self._orders.mkdir(parents=True)
        for name in ("faults.log", "failure.txt", "hung.txt", "unexplained.txt"):
            (self.settings.folder / name).unlink(missing_ok=True)

    async def _with_fleet(self) -> None:
        settings, engines = self.settings, self.engines
        fleet = ObservedFleet(
            engines.spec,
            settings.replicas,
            engines.refit(settings.in_flight),
            engines.health,
            engines.replica_class,
            self._scene,
            self._witness,
        )
        victims = [
            Victim(number, fleet, self._scene, self._orders, engines.orders, engines.real, engines.pace)
            for number in range(settings.replicas)
        ]
        for victim in victims:
            victim.calm()
        steps = Steps(fleet, engines, self._scene, self._witness, self.result, settings.seed)
        scheduler = SchedulerVictim(steps.dispatcher, steps.link, self._scene, engines.pace)
        injection = Injection(
            self._plan, [*victims, scheduler], lambda survived: self._survived(survived, fleet)
        )
        self._describe = lambda: self._described(fleet, injection)
        self._watchdog.loop = asyncio.get_running_loop()
        print(f"chaos: starting {settings.replicas} replicas", file=sys.stderr, flush=True)
        await fleet.start(lambda number: self._scene.changed())
        self._watchdog.patience_s = engines.pace.patience_s
        try:
            await self._steps(steps, fleet, injection)
            await self._look_over(fleet, victims)
        except Exception as error:
            self.result.failure = f"{type(error).__name__}: {error}"
            (settings.folder / "failure.txt").write_text(self._describe())
        finally:
            self._take_stock(fleet)
            await fleet.stop()
            self.result.unexplained += injection.unexplained
            (settings.folder / "unexplained.txt").write_text("\n".join(injection.unexplained))
        self.result.orphans += await asyncio.to_thread(remains.processes, self.mark, replicas_only=True)
        self.result.orphans += await asyncio.to_thread(remains.actors)

    async def _steps(self, steps: Steps, fleet: ObservedFleet, injection: Injection) -> None:
        """Steps, while faults happen, and one more."""
        self._began = time.monotonic()
        breaking = asyncio.create_task(injection.run())
        telling = asyncio.create_task(self._tell(fleet))
        try:
            while not breaking.done() or self.result.steps < _LEAST_STEPS:
                await steps.step()
            await breaking
            self.result.seconds = time.monotonic() - self._began
            await steps.step()
        finally:
            for task in (breaking, telling):
                task.cancel()
            await asyncio.gather(breaking, telling, return_exceptions=True)

    async def _look_over(self, fleet: ObservedFleet, victims: Sequence[Victim]) -> None:
        """Everyone serves, every turn was answered, and nothing that a transfer needed is left open."""
        for victim in victims:
            await victim.serving()
        self._shared.look()
        actors = [each for victim in victims for each in fleet.processes(victim.number)]
        for process in (psutil.Process(), *actors):
            self.result.orphans += remains.memory_files(process)
        self.result.lost += [f"{name} turn {turn} was never answered" for name, turn in self._witness.pending]

    def _survived(self, survived: Survived, fleet: ObservedFleet) -> None:
        result, fault = self.result, survived.fault
        result.faults += 1
        result.together += survived.together > 0
        result.recoveries[fault.kind].append(survived.recovery_s)
        with (self.settings.folder / "faults.log").open("a") as log:
            log.write(
                f"{time.monotonic() - self._began:9.2f} {fault.number} {fault.kind} replica {fault.replica} "
                f"{survived.stage}: {survived.recovery_s:.2f} s; {'; '.join(survived.reasons)}\n"
            )
        spared = self._plan.spared
        self._memory.sample("driver", psutil.Process(), result.faults)
        for process in fleet.processes(spared):
            self._memory.sample(f"replica {spared}, process {process.pid}", process, result.faults)

    async def _tell(self, fleet: ObservedFleet) -> None:
        """Now and then, how far it is."""
        while True:
            await asyncio.sleep(_EVERY_S)
            self._take_stock(fleet)
            result, seconds = self.result, time.monotonic() - self._began
            print(
                f"chaos: {seconds:.0f} s, {result.faults} of {self.settings.faults} faults survived "
                f"({result.faults / seconds:.2f} /s), {len(fleet.serving)} of {fleet.size} replicas serve, "
                f"epoch {fleet.epoch}, {result.finished} turns, {result.retried} retried, "
                f"{len(result.lost)} lost, {len(result.duplicated)} duplicated, {len(result.stale)} stale",
                file=sys.stderr,
                flush=True,
            )

    def _take_stock(self, fleet: ObservedFleet) -> None:
        witness, result = self._witness, self.result
        result.started, result.finished, result.retried = witness.started, witness.finished, fleet.retried
        result.most_attempts = witness.most_attempts
        result.lost += witness.take_lost()
        result.duplicated += witness.take_again()
        result.memory = self._memory.slopes()
        self._shared.look()

    def _kill_all(self) -> None:
        for process in remains.marked(self.mark):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _described(self, fleet: ObservedFleet, injection: Injection) -> str:
        lines = [fleet.describe()]
        lines += [f"replica {number} has fault {fault}" for number, fault in injection.open.items()]
        lines += [f"turn {turn} of {name} is pending" for name, turn in self._witness.pending]
        return "\n".join(lines)
