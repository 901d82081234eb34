"""NeMo-RL's `VllmGeneration` with turns placed by the scheduler, and drafts."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np
import ray
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration

from nemo_war import snapshot
from nemo_war.errors import UserError
from nemo_war.generation import placement_file
from nemo_war.generation.nemo_rl import events, gym, metrics, release
from nemo_war.generation.nemo_rl.affinity import Row, order, shares
from nemo_war.generation.nemo_rl.block import war_of
from nemo_war.generation.nemo_rl.fleet import Fleet
from nemo_war.generation.nemo_rl.front import Front
from nemo_war.generation.nemo_rl.turns import Turn
from nemo_war.generation.nemo_rl.worker import SERVED, TURNS
from nemo_war.generation.scheduling.actor import RayLink
from nemo_war.generation.scheduling.heartbeat import first_line
from nemo_war.routing import policies
from nemo_war.routing.facts import ReplicaFacts
from nemo_war.routing.policy import Policy

_SHARD: ContextVar[int | None] = ContextVar("nemo_war_shard", default=None)
"""Where the request that is about to be sent goes: NeMo-RL chooses by a method that does not see it."""
_LOCK = threading.Lock()
"""For making a process's front; not in the object, which is pickled."""
_PLACEMENT = f"placement{snapshot.SUFFIX}"
"""File of what the scheduler learned, beside the replicas' own."""

_TOLERANCE = "policy.generation.war.speculative.history.empty_if_damaged"

living: WeakSet[WarGeneration] = WeakSet()
"""Those of this process, made here or come from another one."""


class WarGeneration(VllmGeneration):
    """A drop-in for `VllmGeneration`; copies in other processes share one scheduler.

    Made for a configuration without WAR, it is a `VllmGeneration` and nothing else.
    """

    fleet: Fleet
    started = False
    """Whether the engines are there; until then all is NeMo-RL's own."""
    resumed: ClassVar[Path | None] = None
    """Folder of what this process goes on with, whatever generation comes; see `save`."""

    def __new__(cls, cluster: Any = None, config: Any = None, *arguments: Any, **options: Any) -> Any:
        """See the class. Unpickling passes no configuration."""
        if config is not None and not (war := war_of(config)).enabled:
            return VllmGeneration(cluster, config, *arguments, **options)
        if config is not None:
            release.check(war)
        return super().__new__(cls)

    def __init__(self, cluster: Any, config: Any, *arguments: Any, **options: Any) -> None:
        """See `VllmGeneration`; `config["war"]` is the block.

        Raises:
            ConfigError: the block is wrong, contradicts the rest of the configuration, or wants what this
            release of NeMo-RL cannot do.
        """
        self._war = war_of(config)
        self._front: Front | None = None
        self._policy = self._new_policy()
        self._scheduler = f"nemo-war-scheduler-{os.getpid()}-{id(self):x}"
        self._steps = metrics.Steps(self._war.ab_every)
        super().__init__(cluster, config, *arguments, **options)

    def _post_init(self) -> Any:
        """NeMo-RL's, once the engines are there; then the drafters are attached, and must be active."""
        done = super()._post_init()
        group = self.worker_group
        self._shards = {group.get_dp_leader_worker_idx(shard): shard for shard in range(group.dp_size)}
        self.fleet = Fleet([group.workers[leader] for leader in self._shards])
        self.fleet.start(self._war)
        self.started = True
        living.add(self)
        self.restore()
        return done

    async def _async_generate_base(
        self, data: Any, method_name: str, data_validation_fn: Any, greedy: bool = False
    ) -> AsyncIterator[tuple[int, Any]]:
        """NeMo-RL's, on the replica that the scheduler chooses."""
        generate = super()._async_generate_base
        if not self.started or "input_ids" not in data or data.size != 1:  # text, or what NeMo-RL refuses
            async for answer in generate(data, method_name, data_validation_fn, greedy):
                yield answer
            return
        async with self.front.turn(_prompts(data)[0], self.cfg["max_new_tokens"]) as turn:
            said = type(data)({**data, TURNS: [turn.metadata]})  # the caller may use its own again
            _SHARD.set(turn.replica)
            try:
                async for index, answer in generate(said, method_name, data_validation_fn, greedy):
                    self._enter(turn, answer, 0)
                    del answer[SERVED]
                    yield index, answer
            except Exception as error:
                if turn.replica is not None and isinstance(
                    error.__cause__, (ray.exceptions.RayError, TimeoutError)
                ):
                    self.front.failed(turn.replica)
                raise

    def _next_dp_shard_idx(self) -> int:
        """NeMo-RL's, unless the request's replica is chosen already."""
        chosen = _take_choice()
        return super()._next_dp_shard_idx() if chosen is None else chosen

    @property
    def current_generate_dp_shard_idx(self) -> int:
        """The next in turn, likewise; by this attribute NeMo-RL 0.7 chooses."""
        chosen = _take_choice()
        return self._next_in_turn if chosen is None else chosen

    @current_generate_dp_shard_idx.setter
    def current_generate_dp_shard_idx(self, shard: int) -> None:
        self._next_in_turn = shard

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """NeMo-RL's, which cuts the batch by position, in an order that leaves trajectories at home."""
        if not len(data["input_ids"]):
            return super().generate(data, greedy)
        prompts = _prompts(data)
        with self.front.batch(prompts) as turns:
            sequence = self._order(turns, prompts)
            homes = np.repeat(np.arange(self.dp_size), shares(len(turns), self.dp_size))
            arranged = data.select_indices(sequence)
            arranged[TURNS] = [turns[index].metadata for index in sequence]
            answers = super().generate(arranged, greedy).select_indices(np.argsort(sequence).tolist())
            for index, home in zip(sequence, homes.tolist(), strict=True):
                turns[index].replica = home
                self._enter(turns[index], answers, index)
            del answers[SERVED]
        return answers

    def get_step_metrics(self) -> dict[str, float]:
        """NeMo-RL's, and `war/*`: what happened since the last call, which ends a step."""
        self.front.learned(gym.take_learned())
        records = self._steps.take(self.fleet.ask_all("statistics"))
        events.log.append(records)
        return super().get_step_metrics() | metrics.scalars(records)

    def set_learning(self, learning: bool) -> None:
        """Whether what is generated from here on enters the history, on whatever way it is asked for."""
        self.front.learning = learning
        self.fleet.ask_all("set_learning", learning)

    def save(self, folder: Path) -> None:
        """Write all that was learned into a folder of its own, which every node of the job can see.

        Raises:
            UserError: it could not be written; rollouts go on.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _raise_any(self.fleet.ask_all("save_state", str(folder)))
            placement_file.write(folder / _PLACEMENT, self.front.state())
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror}") from None
        except ray.exceptions.RayError as error:
            raise UserError(f"a replica did not save it: {first_line(error)}") from None

    def restore(self) -> None:
        """Go on with what `save` wrote into the folder that is resumed; what is not there is begun anew.

        Raises:
            UserError: a file is damaged or foreign, and `history.empty_if_damaged` is not set.
        """
        if self.resumed is None or not self.resumed.is_dir():
            return
        try:
            _raise_any(self.fleet.ask_all("restore_state", str(self.resumed)))
            policy = self._new_policy()
            placement_file.read(self.resumed / _PLACEMENT, policy)
            self._policy = policy
        except UserError as error:
            if not self._war.speculative.history.empty_if_damaged:
                raise UserError(f"{error}; or set {_TOLERANCE}=true to begin anew") from None
            print(f"nemo_war: begins anew, as {error}", flush=True)

    @property
    def front(self) -> Front:
        """Where this process's turns are placed; a copy of the object in another process has its own."""
        with _LOCK:
            if self._front is None:
                self._front = Front(self._war, self.fleet, self._replicas, self._connect, ray.put)
            return self._front

    def shutdown(self) -> bool:
        """NeMo-RL's."""
        front, self._front = self._front, None
        if front is not None:
            front.stop()
        living.discard(self)
        return super().shutdown()

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process."""
        return {**self.__dict__, "_front": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In another process, which may be the one that saves checkpoints."""
        from nemo_war.generation.nemo_rl import seams

        self.__dict__.update(state)
        living.add(self)
        seams.follow()

    def _order(self, turns: list[Turn], prompts: list[np.ndarray]) -> list[int]:
        """The order of a batch; NeMo-RL's own where WAR is off for this step."""
        if not self.front.on:
            return list(range(len(turns)))
        rows = [
            Row(self.front.turns.home(turn.metadata.trajectory), len(prompt), turn.metadata.group)
            for turn, prompt in zip(turns, prompts, strict=True)
        ]
        return order(rows, self.dp_size)

    def _enter(self, turn: Turn, answers: Any, index: int) -> None:
        """Enter a turn's answer, and hear of a refit that it tells of."""
        length = int(answers["unpadded_sequence_lengths"][index])
        turn.answer = answers["output_ids"][index, :length].numpy().astype(np.int32)
        turn.generated = int(answers["generation_lengths"][index])
        if "gen_leader_worker_idx" in answers:
            turn.replica = self._shards[answers["gen_leader_worker_idx"][index]]
        for served in answers[SERVED][index : index + 1]:  # none where there was no room to generate
            turn.cached_tokens = served.cached_tokens
            self.front.saw(served.ended)

    def _new_policy(self) -> Policy:
        return policies.make(self._war.routing.policy, self._war.routing.seed)

    def _connect(self) -> RayLink:
        return RayLink(self._policy, self._scheduler)

    def _replicas(self) -> Sequence[ReplicaFacts]:
        monitor = getattr(self, "fleet_monitor", None)  # NeMo-RL 0.7 has none
        return self.fleet.facts(range(self.fleet.size) if monitor is None else monitor.serving_shards())


@contextmanager
def validating() -> Iterator[None]:
    """Nothing that is generated in the block enters any history."""
    generations = list(living)
    for generation in generations:
        generation.set_learning(False)
    try:
        yield
    finally:
        for generation in generations:
            generation.set_learning(True)


def _take_choice() -> int | None:
    """The replica of the request that is about to be sent. It is for that one, be it that it fails."""
    chosen = _SHARD.get()
    _SHARD.set(None)
    return chosen


def _raise_any(reasons: Iterable[str | None]) -> None:
    for reason in filter(None, reasons):
        raise UserError(reason)


def _prompts(data: Any) -> list[np.ndarray]:
    """int32[n] of each row, without its padding."""
    ids, lengths = data["input_ids"].numpy().astype(np.int32), data["input_lengths"].tolist()
    return [row[:length] for row, length in zip(ids, lengths, strict=True)]
