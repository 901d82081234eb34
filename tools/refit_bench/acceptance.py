"""How well drafts do in the turns after a refit, a resume and a restart, next to steady state.

The same tasks come back in each step (`tasks`), on two replicas at temperature 1. Drafts have no price, so
that acceptance decides and not load. Where the history knows little, only the surest copies are drafted,
so that acceptance length alone flatters it: tokens per step, drafted for or not, tell what it was worth.

Turns are placed so that both replicas get siblings of each task: what one of them is compared with is then
the same kind of turns. Steady state is measured several times in between, as a history that grows makes
drafts better still. A phase is as many whole steps as give the turns that were asked for.

  empty             the first turns of engines that know nothing
  steady            nothing happened before
  refit_identical   new weights that are the old ones
  refit             weights with 0.002 of each matrix's spread as noise, about what a GRPO step does
  resume            new engine processes with the saved history and calibration, by a checkpoint's way
  restart           turns of a replica that was killed, came back by itself and was told by its peer;
                    `peer` are those of the other one at that time
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_war.generation.embedded.chat import Chat
from nemo_war.generation.embedded.checkpoint import WAR, Checkpoint, Checkpoints
from nemo_war.generation.embedded.config import RunConfig
from nemo_war.generation.embedded.fleet import Fleet
from nemo_war.generation.embedded.rollout import Rollouts
from nemo_war.generation.embedded.training_info import TrainingInfo
from nemo_war.generation.embedded.weights import Weights, share_weights
from nemo_war.generation.embedded.workplace import Workplace
from nemo_war.telemetry.log import EventLog
from nemo_war.telemetry.records import Pass, TurnRecord
from tests.engine.policies import as_bytes, perturbed
from tools.refit_bench.drafting import Drafting, shares, total
from tools.refit_bench.tasks import KINDS, Kind

_RECIPE = Path(__file__).parents[2] / "examples" / "configs" / "grpo_embedded_cpu.yaml"
_TASKS = 6
_SETTINGS = [
    f"data.num_prompts={_TASKS}", f"grpo.num_prompts_per_step={_TASKS}",
    "grpo.num_generations_per_prompt=4", "grpo.max_num_steps=1000",
    "policy.generation.temperature=1", "policy.generation.max_new_tokens=64",
    "env.file_edit.cfg.lines_min=4", "env.file_edit.cfg.lines_max=6",
    "policy.generation.war.speculative.max_running=1000",
    "policy.generation.war.routing.policy=sticky",
    "policy.generation.war.health.probe_interval_s=1",
    "cluster.num_replicas=2", "cluster.cpus_per_replica=1", "checkpointing.enabled=true",
]  # fmt: skip
_PERTURBATION = 0.002
_LAST_NORM = "model.norm.weight"
_KILLED = 0
_RETURN_S = 900.0
"""A start takes minutes where others use the cores, too."""
_LIVE = Pass("war", "live")


async def acceptance(
    model: Path, folder: Path, turns: int, kinds: Iterable[str], sureness: float | None
) -> dict[str, Any]:
    """By kind of task, all phases, and what each one's drafts did as shares of steady state's.

    Args:
        model: the bundled one.
        folder: for checkpoints and logs.
        turns: of a phase, at least.
        kinds: of `tasks.KINDS`.
        sureness: factor on the policy's logits; None: each kind's own.
    """
    result = {}
    for name in kinds:
        kind = KINDS[name] if sureness is None else KINDS[name]._replace(sureness=sureness)
        (folder / name).mkdir()
        result[name] = await _measure(model, folder / name, turns, kind)
        print(f"{name}: {result[name]}", flush=True)
    return result


async def _measure(model: Path, folder: Path, turns: int, kind: Kind) -> dict[str, Any]:
    from transformers import AutoTokenizer

    config = RunConfig.load(_RECIPE, [*_SETTINGS, f"checkpointing.checkpoint_dir={folder / 'checkpoints'}"])
    with EventLog(folder / "events.jsonl") as log:
        checkpoints = Checkpoints(config)
        place = Workplace(config, model, folder, Chat(AutoTokenizer.from_pretrained(model)), log, checkpoints)
        phases = _Phases(turns, kind)
        old, new = (_policy(model, scale, kind.sureness) for scale in (0.0, _PERTURBATION))
        checkpoint = await _first_life(place, phases, old, new)
        await _second_life(replace(place, resumed=checkpoint), phases, new)
    return phases.result()


def _policy(model: Path, scale: float, sureness: float) -> Weights:
    """The model's weights with so much noise; its last norm, which scales all logits, makes it surer."""
    weights = perturbed(model, scale)
    weights[_LAST_NORM] = (weights[_LAST_NORM].float() * sureness).to(weights[_LAST_NORM].dtype)
    return share_weights(as_bytes(weights))


async def _first_life(place: Workplace, phases: _Phases, old: Weights, new: Weights) -> Checkpoint:
    """Until the checkpoint that is returned."""
    fleet = place.fleet(war=True)
    try:
        await fleet.start()
        await fleet.refit(old)
        engines = _Engines(place, fleet, phases.kind, phases.steps)
        await phases.run("empty", engines)
        await phases.run("warm_up", engines)
        await phases.run("steady", engines)
        await fleet.refit(old)
        await phases.run("refit_identical", engines)
        await fleet.refit(new)
        await phases.run("refit", engines)
        await phases.run("steady", engines)
        return await _saved(place, fleet, engines, new)
    finally:
        await fleet.stop()


async def _second_life(place: Workplace, phases: _Phases, weights: Weights) -> None:
    """In new processes, from the checkpoint on."""
    assert place.resumed is not None
    fleet = place.fleet(war=True)
    try:
        await fleet.start()
        await fleet.refit(weights)
        reasons = (await fleet.ask("restore_state", str(place.resumed.war))).values()
        if any(reasons):
            raise RuntimeError(f"what was saved could not be restored: {list(reasons)}")
        engines = _Engines(place, fleet, phases.kind, phases.steps)
        await phases.run("resume", engines)
        await _restart(fleet)
        await phases.run_apart(engines)
        await phases.run("steady", engines)
    finally:
        await fleet.stop()


async def _saved(place: Workplace, fleet: Fleet, engines: _Engines, weights: Weights) -> Checkpoint:
    """What a run saves between two steps, but for the trainer's files."""
    assert place.checkpoints is not None
    info = TrainingInfo.of(place.config, engines.step, fleet.epoch, weights.digest)
    with place.checkpoints.new(info) as folder:
        reasons = (await fleet.ask("save_state", str(folder / WAR))).values()
        if any(reasons):
            raise RuntimeError(f"what was learned could not be saved: {list(reasons)}")
    checkpoint = place.checkpoints.latest()
    assert checkpoint is not None
    return checkpoint


async def _restart(fleet: Fleet) -> None:
    """Kill one replica's processes, and wait until it was seeded by its peer and serves again."""
    died = time.perf_counter()
    for process in list(fleet._actors._processes[_KILLED]):
        process.kill()
    async with asyncio.timeout(_RETURN_S):
        while _KILLED in fleet.serving:
            await asyncio.sleep(0.05)
        while _KILLED not in fleet.serving:
            await asyncio.sleep(0.2)
        while not (await fleet.ask_one(_KILLED, "statistics"))["history_tokens"]:
            await asyncio.sleep(0.2)
    print(f"replica {_KILLED} was back after {time.perf_counter() - died:.0f} s", flush=True)


class _Engines:
    """A fleet at work, step by step.

    Attributes:
        step: the next one, counted over all lives.
    """

    def __init__(self, place: Workplace, fleet: Fleet, kind: Kind, first: int) -> None:
        self.step = first
        self._kind = kind
        self._place, self._fleet = place, fleet
        self._turns: Counter[int] = Counter()
        self._tokens: Counter[int] = Counter()
        dispatcher = fleet.dispatcher(place.placement("war"))
        self._rollouts = Rollouts(fleet, dispatcher, self._note, place.clock)

    def _note(self, record: object) -> None:
        if isinstance(record, TurnRecord):
            self._turns[record.replica] += 1
            self._tokens[record.replica] += record.output_tokens

    async def roll_out(self, enough: Callable[[Counter[int]], bool]) -> dict[int, Drafting]:
        """Whole steps until there are enough turns by replica; what each replica's drafts did meanwhile."""
        self._turns.clear()
        self._tokens.clear()
        before = await self._fleet.ask("statistics")
        while not enough(self._turns):
            starts = self._kind.starts(self._place, self.step)
            await self._rollouts.run(_LIVE, self.step, starts, lambda: None)
            self.step += 1
        after = await self._fleet.ask("statistics")
        return {
            number: Drafting.between(self._turns[number], self._tokens[number], before[number], after[number])
            for number in after
        }


class _Phases:
    """What was measured so far.

    Attributes:
        steps: done in all lives.
        kind: of task.
    """

    def __init__(self, turns: int, kind: Kind) -> None:
        self.steps, self.kind = 0, kind
        self._enough = turns
        self._measured: list[tuple[str, Drafting]] = []

    async def run(self, name: str, engines: _Engines) -> None:
        """A phase of both replicas."""
        started = time.perf_counter()
        by_replica = await engines.roll_out(lambda turns: turns.total() >= self._enough)
        self.steps = engines.step
        self._add(name, total(by_replica.values()), started)

    async def run_apart(self, engines: _Engines) -> None:
        """The phase after a restart: the turns of that replica, and those of its peer."""
        started = time.perf_counter()
        by_replica = await engines.roll_out(lambda turns: turns[_KILLED] >= self._enough)
        self._add("restart", by_replica.pop(_KILLED), started)
        self._add("peer", total(by_replica.values()), started)

    def _add(self, name: str, drafting: Drafting, started: float) -> None:
        self._measured.append((name, drafting))
        print(f"{name}: {drafting.facts()} in {time.perf_counter() - started:.0f} s", flush=True)

    def result(self) -> dict[str, Any]:
        names = dict.fromkeys(name for name, _ in self._measured)
        phases = {name: total(each for other, each in self._measured if other == name) for name in names}
        steady = [each for name, each in self._measured if name == "steady"]
        return {
            "phases": {name: each.facts() for name, each in phases.items()},
            "steady_range": [
                pick(round(each.acceptance_length or 0, 3) for each in steady) for pick in (min, max)
            ],
            "share_of_steady": {name: shares(each, total(steady)) for name, each in phases.items()},
        }
