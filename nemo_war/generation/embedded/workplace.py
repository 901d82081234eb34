"""What every part of a run needs: the configuration, the prompts, the log and the clock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from nemo_war.config import PolicyName
from nemo_war.generation.embedded.chat import Chat
from nemo_war.generation.embedded.checkpoint import Checkpoint, Checkpoints, restore_policy
from nemo_war.generation.embedded.config import RunConfig
from nemo_war.generation.embedded.dataset import Dataset, Prompt
from nemo_war.generation.embedded.engine import EngineSpec
from nemo_war.generation.embedded.environments import build
from nemo_war.generation.embedded.environments.interface import Environment
from nemo_war.generation.embedded.fleet import Fleet, RefitOutcome
from nemo_war.generation.embedded.rollout import Rollouts, Start, Trajectory
from nemo_war.generation.embedded.script import Judge, LiveScript, RecordedScript, RecordedTrajectory
from nemo_war.generation.embedded.weights import Weights
from nemo_war.generation.refit import Transition
from nemo_war.generation.scheduling.actor import RayLink
from nemo_war.routing import policies
from nemo_war.routing.dispatcher import Placer
from nemo_war.routing.options import Options
from nemo_war.routing.policy import Policy
from nemo_war.speculative.archive import FOLDER
from nemo_war.telemetry.log import EventLog
from nemo_war.telemetry.records import (
    Pass,
    RefitRecord,
    ReliabilityRecord,
    ReplicaRecord,
    StepRecord,
    TransitionRecord,
)


@dataclass
class Workplace:
    """A run in progress.

    Attributes:
        config: what was asked for.
        model: local folder of the model.
        folder: the run's own folder.
        chat: tokenizer and chat template.
        log: the event log.
        checkpoints: where this run's are; None without.
        resumed: the one that this run goes on from; None where it starts anew.
    """

    config: RunConfig
    model: Path
    folder: Path
    chat: Chat
    log: EventLog
    checkpoints: Checkpoints | None = None
    resumed: Checkpoint | None = None
    environments: dict[str, Environment] = field(init=False)
    dataset: Dataset = field(init=False)
    _started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        entries = {name: entry for name, entry in self.config.env if entry is not None}
        self.environments = {name: build(name, entry.cfg) for name, entry in entries.items()}
        weights = {name: entry.weight for name, entry in entries.items()}
        self.dataset = Dataset(
            self.environments, weights, self.config.data.num_prompts, self.config.grpo.seed
        )

    def clock(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started

    def fleet(self, *, war: bool) -> Fleet:
        """A fleet that is not started: WAR's, or one of stock engines.

        That of a run that goes on draws other random numbers than the steps before did, and its
        first refit is the one whose weights the checkpoint has.
        """
        generation, cluster = self.config.policy.generation, self.config.cluster
        done, epoch = (self.resumed.info.step, self.resumed.info.epoch - 1) if self.resumed else (0, 0)
        spec = EngineSpec(
            model=str(self.model),
            engine=generation.engine_arguments(),
            war=generation.war if war else None,
            temperature=generation.temperature,
            stop_token_ids=tuple(generation.stop_token_ids or ()),
            seed=self.config.grpo.seed + done * cluster.num_replicas,
            resumes=self.resumed is not None,
        )
        return Fleet(
            spec,
            cluster.num_replicas,
            cluster.cpus_per_replica,
            generation.war.refit,
            generation.war.health,
            partial(self._note, "war" if war else "stock"),
            epoch,
        )

    def _note(self, fleet: str, transition: Transition) -> None:
        self.log.append(TransitionRecord(fleet=fleet, at_s=self.clock(), **asdict(transition)))

    def placement(self, mode: str) -> Policy:
        """Placement of a mode: NeMo-RL's round robin for the baseline, as configured for WAR's."""
        routing = self.config.policy.generation.war.routing
        stock: dict[str, PolicyName] = {"baseline": "round_robin", "sticky": "sticky"}
        return policies.make(stock.get(mode, routing.policy), routing.seed, self._options())

    def _options(self) -> Options:
        """Of `war`: the index counts in the engines' own blocks, where the configuration sets their size."""
        block_size = self.config.policy.generation.engine_arguments().get("block_size")
        return Options() if block_size is None else Options(block_tokens=block_size)

    def rollouts(self, fleet: Fleet, mode: str) -> Rollouts:
        """The rollout loop of a mode."""
        policy = self.placement(mode)
        if self.resumed:
            restore_policy(self.resumed.war, policy)
        if mode == "war" and self.config.policy.generation.war.routing.shared:
            dispatcher: Placer = fleet.shared_dispatcher(RayLink(policy))
        else:
            dispatcher = fleet.dispatcher(policy)
        return Rollouts(fleet, dispatcher, self.log.append, self.clock)

    def live_start(self, which: Pass, step: int, prompt: Prompt, sibling: int) -> Start:
        """A trajectory whose environment decides."""
        grpo, policy = self.config.grpo, self.config.policy
        script = LiveScript(
            self._judge(prompt),
            self.chat.prompt(prompt.task.messages),
            max_turns=grpo.max_rollout_turns,
            max_new_tokens=policy.generation.max_new_tokens,
            max_length=policy.max_total_sequence_length,
            stop_strings=tuple(policy.generation.stop_strings or ()),
        )
        return Start(_name(which, step, prompt, sibling), prompt.task.name, script)

    def recorded_start(self, which: Pass, step: int, recorded: RecordedTrajectory) -> Start:
        """A trajectory whose course is fixed."""
        prompt = Prompt(recorded.environment, recorded.task)
        script = RecordedScript(recorded, self._judge(prompt))
        return Start(_name(which, step, prompt, recorded.sibling), prompt.task.name, script)

    def _judge(self, prompt: Prompt) -> Judge:
        return Judge(self.environments[prompt.environment], prompt.task, self.chat)

    async def keep_history(self, fleet: Fleet) -> None:
        """Write what each replica's drafter remembers into the run's folder; stock fleets have nothing."""
        if fleet.spec.speculates:
            folder = self.folder / FOLDER
            with contextlib.suppress(OSError):  # each replica tells of its file
                folder.mkdir(exist_ok=True)
            await fleet.ask("save_history", str(folder))

    async def refit(self, which: Pass, fleet: Fleet, weights: Weights) -> RefitOutcome:
        """Refit the fleet and put it on record.

        Raises:
            RefitError: see `Fleet.refit`.
        """
        outcome = await fleet.refit(weights)
        self.log.append(RefitRecord(run=which, transfer_bytes=weights.size, **asdict(outcome)))
        return outcome


def _name(which: Pass, step: int, prompt: Prompt, sibling: int) -> str:
    return f"{which.mode}-{which.phase}{which.repeat}/step{step}/{prompt.task.name}/{sibling}"


def step_record(
    which: Pass, step: int, epoch: int, makespan_s: float, trajectories: Sequence[Trajectory], **more: Any
) -> StepRecord:
    """A step's totals, from its trajectories."""
    return StepRecord(
        run=which,
        step=step,
        epoch=epoch,
        rollout_s=makespan_s,
        train_s=more.pop("train_s", 0.0),
        refit_s=more.pop("refit_s", 0.0),
        trajectories=len(trajectories),
        turns=sum(each.requests for each in trajectories),
        prompt_tokens=sum(each.prompt_tokens for each in trajectories),
        output_tokens=sum(map(sum, (each.generated for each in trajectories))),
        truncations=sum(each.truncated for each in trajectories),
        errors=sum(each.error is not None for each in trajectories),
        mixed=sum(len(each.epochs) > 1 for each in trajectories),
        reward_mean=sum(each.reward for each in trajectories) / max(1, len(trajectories)),
        **more,
    )


class DraftMeter:
    """Turns the replicas' counters, which only grow, into what one step added."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._before: dict[int, dict[str, Any]] = {}

    async def start(self) -> None:
        """Remember where the counters stand."""
        self._before = await self._fleet.ask("statistics")

    async def stop(self, which: Pass, step: int, log: EventLog) -> None:
        """Record what was added since `start`; stock replicas have nothing to say.

        Of one that was started again meanwhile, only what it did since is known.
        """
        curves = await self._fleet.ask("reliability")
        for replica, after in (await self._fleet.ask("statistics")).items():
            if after:
                before = self._before.get(replica, {})
                if before.get("engine_steps", 0) > after["engine_steps"]:
                    before = {}
                held = {key: after[key] for key in ("history_tokens", "history_epochs")}
                added = {key: after[key] - before.get(key, 0) for key in after if key not in held}
                log.append(ReplicaRecord(run=which, step=step, replica=replica, **added, **held))
                for predicted, observed, tokens in curves.get(replica, ()):
                    log.append(ReliabilityRecord(which, step, replica, predicted, observed, tokens))
