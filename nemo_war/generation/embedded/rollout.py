"""The multi-turn loop: one coroutine per trajectory, one engine request per turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from nemo_war.generation.embedded.fleet import Fleet
from nemo_war.generation.embedded.script import RecordedTurn, Script
from nemo_war.generation.embedded.turn import Answer, Turn
from nemo_war.generation.history_exchange import Exchanged
from nemo_war.generation.refit import RefitError
from nemo_war.generation.scheduling.dispatcher import SharedDispatcher
from nemo_war.metadata import TurnMetadata
from nemo_war.routing.dispatcher import Placer
from nemo_war.snapshot import State
from nemo_war.telemetry.records import ExchangeRecord, OutageRecord, Pass, TurnRecord


@dataclass(frozen=True, slots=True)
class Start:
    """A trajectory to roll out."""

    name: str
    group: str
    script: Script


@dataclass(slots=True)
class Trajectory:
    """A rolled-out trajectory.

    Attributes:
        tokens: the whole history, prompt and observations included.
        prompt_length: how many of them are the prompt.
        generated: per token, whether the policy sampled it.
        logprobs: per token, the policy's logprob; 0 where it was not sampled.
        reward: sum over the turns.
        turns: the work it was, for replay.
        requests: turns asked for; one more than `turns` when the last one failed.
        prompt_tokens: sum of their prompts, in tokens.
        truncated: a turn ended at its token limit, or there was no room for another.
        error: why generation failed; None otherwise.
        homes: replicas that served it.
        epochs: policy epochs that it was generated under; more than one is a mixed-policy trajectory.
    """

    name: str
    group: str
    tokens: list[int]
    generated: list[bool]
    logprobs: list[float]
    prompt_length: int
    requests: int = 0
    prompt_tokens: int = 0
    reward: float = 0.0
    turns: list[RecordedTurn] = field(default_factory=list)
    truncated: bool = False
    error: str | None = None
    homes: set[int] = field(default_factory=set)
    epochs: set[int] = field(default_factory=set)

    def append_generated(self, answer: Answer) -> None:
        """Add a turn's tokens."""
        self.epochs.update(answer.epochs)
        self.tokens += answer.tokens
        self.generated += [True] * len(answer.tokens)
        self.logprobs += answer.logprobs

    def append_given(self, tokens: Sequence[int]) -> None:
        """Add an observation's tokens."""
        self.tokens += tokens
        self.generated += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)


class Rollouts:
    """Rolls trajectories out on a fleet, and records every turn and every exchange of history."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Placer,
        record: Callable[[TurnRecord | ExchangeRecord | OutageRecord], None],
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._record = record
        self._clock = clock

    async def run(
        self, which: Pass, step: int, starts: Sequence[Start], on_done: Callable[[], None]
    ) -> tuple[list[Trajectory], float]:
        """Roll out one step's trajectories, all at once.

        Returns:
            The trajectories in order, and the makespan in seconds.

        Raises:
            RefitError: the fleet serves no more.
        """
        self._dispatcher.begin_step(len(starts))
        started = time.perf_counter()

        async def one(start: Start) -> Trajectory:
            try:
                trajectory = await self._roll(which, step, start)
            finally:
                self._dispatcher.end(start.name)
            self._fleet.exchange.ended(start.name, len(trajectory.tokens))
            on_done()
            return trajectory

        async with self._fleet.exchange.step(partial(self._report, which, step)):
            tasks = [asyncio.create_task(one(start)) for start in starts]
            try:
                done = await asyncio.gather(*tasks)
            except BaseException:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                raise
            makespan = time.perf_counter() - started
        if isinstance(self._dispatcher, SharedDispatcher):
            self._record(OutageRecord(run=which, step=step, **asdict(self._dispatcher.take_outages())))
        await self._commit(done)
        await self._fleet.exchange.end_step()
        return done, makespan

    def _report(self, which: Pass, step: int, when: str, done: Exchanged) -> None:
        self._record(ExchangeRecord(run=which, step=step, when=when, **asdict(done)))

    async def placement_state(self) -> State | None:
        """What placement learned, for a checkpoint; None where there is nothing, or it cannot be had."""
        return await self._dispatcher.state()

    async def stop(self) -> None:
        """There will be no further step."""
        await self._dispatcher.stop()

    async def _roll(self, which: Pass, step: int, start: Start) -> Trajectory:
        prompt = start.script.prompt
        size = len(prompt)
        trajectory = Trajectory(
            start.name, start.group, [*prompt], [False] * size, [0.0] * size, prompt_length=size
        )
        metadata = TurnMetadata(start.name, start.group, learn=which.phase != "validation")
        while True:
            limits = start.script.limits(len(trajectory.tokens))
            if limits is None:
                trajectory.truncated = True
                return trajectory
            metadata = replace(metadata, turn=len(trajectory.turns), epoch=self._fleet.epoch)
            turn = Turn(
                prompt=tuple(trajectory.tokens),
                metadata=metadata,
                max_new_tokens=limits.tokens,
                min_new_tokens=limits.tokens if limits.exact else 0,
                ignore_eos=limits.exact,
                stop_strings=limits.stop_strings,
            )
            trajectory.requests += 1
            trajectory.prompt_tokens += len(turn.prompt)
            answer = await self._generate(which, step, turn, trajectory)
            if answer is None:
                return trajectory
            trajectory.append_generated(answer)
            trajectory.truncated |= answer.finish_reason == "length" and not limits.exact
            verdict = start.script.judge(list(answer.tokens))
            trajectory.reward += verdict.reward
            observation = verdict.observation
            trajectory.turns.append(
                RecordedTurn(len(answer.tokens), None if observation is None else tuple(observation))
            )
            if observation is None:
                return trajectory
            trajectory.append_given(observation)

    async def _generate(self, which: Pass, step: int, turn: Turn, trajectory: Trajectory) -> Answer | None:
        """One turn; an engine's error ends this trajectory only, and is on record."""
        started, error, answer, replica = self._clock(), None, None, -1
        try:
            replica, answer = await self._fleet.generate(turn, self._dispatcher)
            trajectory.homes.add(replica)
        except RefitError:
            raise
        except Exception as failure:
            error = trajectory.error = f"{type(failure).__name__}: {failure}".splitlines()[0]
        self._record(
            TurnRecord(
                run=which,
                step=step,
                epoch=answer.epochs[0] if answer else turn.metadata.epoch,
                trajectory=trajectory.name,
                group=trajectory.group,
                turn=turn.metadata.turn,
                replica=replica,
                start_s=started,
                first_token_s=started + answer.first_token_s if answer else 0.0,
                end_s=self._clock(),
                prompt_tokens=len(turn.prompt),
                cached_tokens=answer.cached_tokens if answer else 0,
                output_tokens=len(answer.tokens) if answer else 0,
                finish_reason=answer.finish_reason if answer else "error",
                error=error,
                mixed=answer is not None and answer.epochs[0] != answer.epochs[1],
            )
        )
        return answer

    async def _commit(self, trajectories: Sequence[Trajectory]) -> None:
        """Replicas learn what the output really was; only the host sees stop strings."""
        lengths: dict[int, dict[str, int]] = {}
        for trajectory in trajectories:
            for replica in trajectory.homes:
                lengths.setdefault(replica, {})[trajectory.name] = len(trajectory.tokens)
        await self._fleet.commit(lengths)
