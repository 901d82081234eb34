"""A live pass: GRPO steps of rollout, update and refit, on one fleet."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nemo_war.errors import UserError
from nemo_war.generation.embedded.checkpoint import POLICY, WAR, Checkpoints, NotSavedError, save_policy
from nemo_war.generation.embedded.dataset import Prompt
from nemo_war.generation.embedded.fleet import Fleet
from nemo_war.generation.embedded.policy_logprobs import Sample
from nemo_war.generation.embedded.rollout import Rollouts, Trajectory
from nemo_war.generation.embedded.script import RecordedTrajectory
from nemo_war.generation.embedded.trainer import Trainer, TrainerConfig
from nemo_war.generation.embedded.training_info import TrainingInfo
from nemo_war.generation.embedded.weights import Weights, share_weights
from nemo_war.generation.embedded.workplace import DraftMeter, Workplace, step_record
from nemo_war.routing.round_robin import RoundRobin
from nemo_war.telemetry.progress import progress, stage
from nemo_war.telemetry.records import BeginRecord, CheckpointRecord, Pass, ResumeRecord


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Fixed work of one step: the weights it was generated with, and its trajectories."""

    weights: Weights
    trajectories: tuple[RecordedTrajectory, ...]


@dataclass(slots=True)
class Recording:
    """Fixed work of a whole live pass."""

    steps: list[RecordedStep] = field(default_factory=list)


class LivePass:
    """Trains a fresh copy of the policy on one fleet's rollouts."""

    def __init__(self, place: Workplace, fleet: Fleet, mode: str) -> None:
        self._place = place
        self._fleet = fleet
        self._which = Pass(mode, "live")
        self._rollouts = place.rollouts(fleet, mode)
        self._plain = Rollouts(fleet, fleet.dispatcher(RoundRobin()), place.log.append, place.clock)
        self._meter = DraftMeter(fleet)
        self._trainer = Trainer(place.model, trainer_config(place))
        if place.resumed:
            self._trainer.load(place.resumed.policy)

    async def run(self) -> Recording:
        """All steps of the run that are not done yet.

        Raises:
            RefitError: a refit failed; the step it belongs to counts for nothing.
            UserError: what WAR learned in an earlier process could not be read.
        """
        recording, steps = Recording(), self._place.config.grpo.max_num_steps
        self._place.log.append(BeginRecord(self._which, steps))
        weights = share_weights(self._trainer.state_bytes())
        await self._place.refit(self._which, self._fleet, weights)
        done = await self._resume(weights)
        for step in range(done, steps):
            recorded, weights = await self._step(step, weights)
            recording.steps.append(recorded)
            await self._validate(step)
            await self._save(step + 1, weights)
        return recording

    async def _resume(self, weights: Weights) -> int:
        """Go on with what was learned; returns how many steps are done.

        Only now, as the refit before told the drafters of a new policy, which this one is not.
        """
        resumed, fleet = self._place.resumed, self._fleet
        if resumed is None:
            return 0
        _raise_any(UserError, (await fleet.ask("restore_state", str(resumed.war))).values())
        step = resumed.info.step
        self._place.log.append(
            ResumeRecord(self._which, step, fleet.epoch, weights.digest, str(resumed.folder))
        )
        return step

    async def _save(self, done: int, weights: Weights) -> None:
        """Save a checkpoint if one is due, behind the refit: its policy is the one of the next step.

        One that cannot be written costs those steps that would have to be done again, the end of the run
        would cost what was learned since the one before.
        """
        checkpoints = self._place.checkpoints
        if checkpoints is None or not checkpoints.due(done):
            return
        started, error = time.monotonic(), ""
        try:
            await self._write(
                checkpoints, TrainingInfo.of(self._place.config, done, self._fleet.epoch, weights.digest)
            )
        except NotSavedError as failure:
            error = str(failure)
        seconds = time.monotonic() - started
        self._place.log.append(CheckpointRecord(self._which, done, seconds, error))
        if error:
            stage(
                f"{self._label(done - 1)}: WARNING: {error}; the run goes on, and the next one that is due "
                f"is tried again: make room in {checkpoints.folder}"
            )
        else:
            stage(f"{self._label(done - 1)}: saved as {checkpoints.folder}/step_{done} in {seconds:.1f} s")

    async def _write(self, checkpoints: Checkpoints, info: TrainingInfo) -> None:
        """Write a checkpoint.

        Raises:
            NotSavedError: it could not be written.
        """
        with checkpoints.new(info) as folder:
            self._trainer.save(folder / POLICY)
            _raise_any(OSError, (await self._fleet.ask("save_state", str(folder / WAR))).values())
            save_policy(folder / WAR, await self._rollouts.placement_state())

    async def _step(self, step: int, weights: Weights) -> tuple[RecordedStep, Weights]:
        grpo, place = self._place.config.grpo, self._place
        prompts = place.dataset.step(step, grpo.num_prompts_per_step)
        active = await self._set_active(step)
        await self._meter.start()
        trajectories, makespan = await self._roll_out(
            self._which, step, prompts, grpo.num_generations_per_prompt, active
        )
        await self._meter.stop(self._which, step, place.log)
        samples = [_sample(each) for each in trajectories if any(each.generated)]
        stage(f"{self._label(step)}: updating the policy on {len(samples)} trajectories")
        update = self._trainer.update(samples)
        new = share_weights(self._trainer.state_bytes())
        epoch = self._fleet.epoch
        refit = await place.refit(self._which, self._fleet, new)
        place.log.append(
            record := step_record(
                self._which, step, epoch, makespan, trajectories,
                train_s=update.seconds, refit_s=refit.seconds, loss=update.loss, grad_norm=update.grad_norm,
                logprob_error=update.logprob_error, war_active=active,
            )
        )  # fmt: skip
        await place.keep_history(self._fleet)
        stage(
            f"{self._label(step)}: {record.output_tokens} tokens in {makespan:.1f} s, "
            f"reward {record.reward_mean:.2f}, update {update.seconds:.1f} s, "
            f"refit {refit.seconds:.1f} s (KV reset by all {refit.replicas} replicas)"
        )
        siblings = grpo.num_generations_per_prompt
        return RecordedStep(weights, _record(prompts, trajectories, siblings)), new

    async def _set_active(self, step: int) -> bool:
        """In-job A/B: WAR on and off in turns of `war.ab_every` steps."""
        every = self._place.config.policy.generation.war.ab_every
        if every is None or self._which.mode != "war":
            return True
        active = (step // every) % 2 == 0
        await self._fleet.ask("enable_drafting", active)
        return active

    async def _roll_out(
        self, which: Pass, step: int, prompts: Sequence[Prompt], siblings: int, active: bool
    ) -> tuple[list[Trajectory], float]:
        starts = [
            self._place.live_start(which, step, each, sibling)
            for each in prompts
            for sibling in range(siblings)
        ]
        rollouts = self._rollouts if active else self._plain
        with progress(f"{self._label(step)}: {which.phase} rollouts", total=len(starts)) as bar:
            return await rollouts.run(which, step, starts, bar.advance)

    async def _validate(self, step: int) -> None:
        """Validation rollouts: one per prompt, on record, and never in the history."""
        grpo = self._place.config.grpo
        if not grpo.val_period or (step + 1) % grpo.val_period or not grpo.max_val_samples:
            return
        which = Pass(self._which.mode, "validation")
        prompts = self._place.dataset.validation(grpo.max_val_samples)
        trajectories, makespan = await self._roll_out(which, step, prompts, 1, True)
        self._place.log.append(step_record(which, step, self._fleet.epoch, makespan, trajectories))

    def _label(self, step: int) -> str:
        return f"{self._which.mode} step {step + 1}/{self._place.config.grpo.max_num_steps}"


def trainer_config(place: Workplace) -> TrainerConfig:
    """The trainer's settings, from the run's configuration."""
    grpo, loss, policy = place.config.grpo, place.config.loss_fn, place.config.policy
    arguments = policy.optimizer.kwargs
    return TrainerConfig(
        lr=arguments.lr,
        weight_decay=arguments.weight_decay,
        betas=arguments.betas,
        eps=arguments.eps,
        max_grad_norm=policy.max_grad_norm,
        micro_batch_size=policy.train_micro_batch_size,
        clip_low=loss.ratio_clip_min,
        clip_high=loss.ratio_clip_max,
        normalize_rewards=grpo.normalize_rewards,
        leave_one_out=grpo.use_leave_one_out_baseline,
        temperature=policy.generation.temperature,
        precision=policy.precision,
    )


def _raise_any(kind: type[Exception], reasons: Iterable[str | None]) -> None:
    """Raise what the first replica said that has a reason to."""
    for reason in reasons:
        if reason is not None:
            raise kind(reason)


def _sample(trajectory: Trajectory) -> Sample:
    return Sample(
        trajectory.tokens, trajectory.generated, trajectory.logprobs, trajectory.reward, trajectory.group
    )


def _record(
    prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], siblings: int
) -> tuple[RecordedTrajectory, ...]:
    """Trajectories as fixed work; one that failed is replayed as far as it came."""
    recorded = []
    for index, trajectory in enumerate(trajectories):
        group, sibling = divmod(index, siblings)
        prompt = prompts[group]
        length = trajectory.prompt_length
        recorded.append(
            RecordedTrajectory(
                prompt.task,
                prompt.environment,
                sibling,
                tuple(trajectory.tokens[:length]),
                tuple(trajectory.turns),
            )
        )
    return tuple(recorded)
