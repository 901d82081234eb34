"""A live pass that is interrupted and gone on with, on a fleet whose engine is a function of its prompts."""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import write_tiny_model

from nemo_war import snapshot
from nemo_war.errors import UserError
from nemo_war.generation.embedded import live
from nemo_war.generation.embedded.checkpoint import Checkpoints
from nemo_war.generation.embedded.config import RunConfig
from nemo_war.generation.embedded.engine import EngineSpec
from nemo_war.generation.embedded.fleet import Fleet, Weights
from nemo_war.generation.embedded.live import LivePass
from nemo_war.generation.embedded.replica import Replica
from nemo_war.generation.embedded.rollout import Start
from nemo_war.generation.embedded.script import TurnLimits, Verdict
from nemo_war.generation.embedded.turn import Answer, Turn
from nemo_war.generation.embedded.workplace import Workplace
from nemo_war.generation.extension import WarExtension
from nemo_war.speculative.archive import read_archive
from nemo_war.speculative.proposer import SETTINGS, SuffixProposer
from nemo_war.telemetry.log import EventLog, read
from nemo_war.telemetry.records import (
    BeginRecord,
    CheckpointRecord,
    RefitRecord,
    ReplicaRecord,
    ResumeRecord,
    StepRecord,
    TurnRecord,
)

EXEMPLAR = Path(__file__).parents[2] / "examples/configs/grpo_embedded_cpu.yaml"
WORDS = 64
STEPS = 4


class Engine(WarExtension):
    """A worker with a real drafter, whose model says what a digest of weights and prompt says."""

    def __init__(self, spec: EngineSpec) -> None:
        arguments = spec.engine_arguments(0)
        drafter = SuffixProposer(
            SimpleNamespace(
                additional_config={SETTINGS: arguments["additional_config"]["war"]},
                speculative_config=SimpleNamespace(num_speculative_tokens=4),
                model_config=SimpleNamespace(max_model_len=256, get_vocab_size=lambda: WORDS),
                parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1),
            )
        )
        self.model_runner = SimpleNamespace(drafter=drafter)
        self.weights = ""

    def war_load_weights(self, path: str) -> dict[str, Any]:
        self.weights = hashlib.blake2b(Path(path).read_bytes()).hexdigest()
        return {"digest": self.weights}

    def war_process(self) -> dict[str, Any]:
        return {}

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(self, method)(*args)]

    async def reset_mm_cache(self) -> None: ...

    async def reset_encoder_cache(self) -> None: ...

    async def reset_prefix_cache(self, **_: object) -> bool:
        return True

    def answer(self, turn: Turn) -> tuple[int, ...]:
        """A few tokens; the drafter sees them as it would, one after the other."""
        seed = hashlib.blake2b(f"{self.weights}{turn.metadata.trajectory}{turn.prompt}".encode()).digest()
        tokens = np.random.default_rng(list(seed)).integers(3, 9, turn.max_new_tokens).astype(np.int32)
        drafter, metadata = self.model_runner.drafter, turn.metadata
        history = drafter.history
        prompt = np.array(turn.prompt, np.int32)
        slot = history.begin(metadata.trajectory, metadata.group, metadata.epoch, prompt)
        slots, one = np.array([slot], np.int32), np.ones(1, np.int32)
        for token in tokens:
            lengths = history.draft(slots, 4 * one, drafter._epoch).lengths
            drafter.counters.drafts += 1
            drafter.counters.draft_tokens += int(lengths.sum())
            history.extend(slots, np.array([[token]], np.int32), one)
        history.end(slot)
        return tuple(tokens.tolist())


class LocalReplica(Replica):
    """Everything of a replica but vLLM."""

    def __init__(self, number: int, spec: EngineSpec) -> None:
        super().__init__(number, spec)
        self._engine = Engine(spec)

    async def generate(self, turn: Turn) -> Answer:
        tokens = self._engine.answer(turn)
        return Answer(tokens, (-2.0,) * len(tokens), "stop", 0, 0.0, (self._epoch, self._epoch))


class LocalActors:
    """In the place of `Actors`: everything but Ray."""

    def __init__(self, spec: EngineSpec, cpus_per_replica: int, replica_class: type) -> None:
        self._spec = spec
        self.replicas: dict[int, LocalReplica] = {}

    async def start(self, number: int) -> dict[str, Any]:
        replica = self.replicas[number] = LocalReplica(number, self._spec)
        await replica._restore_history()
        return {"kv_tokens": 0}

    async def ask(self, number: int, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        answer = getattr(self.replicas[number], method)(*arguments)
        return await answer if inspect.isawaitable(answer) else answer

    async def stop(self) -> None: ...


class Toy:
    """Some turns, rewarded for one word."""

    turns = 2

    def __init__(self, name: str) -> None:
        digest = hashlib.blake2b(name.encode(), digest_size=24).digest()
        self.prompt = [2 + byte % 60 for byte in digest]
        self._turns = self.turns

    def limits(self, context: int) -> TurnLimits:
        return TurnLimits(12)

    def judge(self, tokens: list[int]) -> Verdict:
        self._turns -= 1
        return Verdict(tokens.count(5) / 12, [1, 2, 1] if self._turns else None)


class Place(Workplace):
    """A workplace whose trajectories are toys."""

    def live_start(self, which: Any, step: int, prompt: Any, sibling: int) -> Start:
        start = super().live_start(which, step, prompt, sibling)
        return Start(start.name, start.group, Toy(prompt.task.name))


class FakeChat:
    eos = 0

    def prompt(self, messages: Any) -> list[int]:
        return [1]


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("nemo_war.compat.apply_to_engine", lambda: ())
    monkeypatch.setattr("nemo_war.generation.embedded.fleet.Actors", LocalActors)
    monkeypatch.setattr(
        live, "share_weights", lambda blob: Weights(blob, hashlib.blake2b(blob).hexdigest(), len(blob))
    )
    monkeypatch.setattr("nemo_war.generation.embedded.fleet.ray.put", lambda blob: blob)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), tied=True)


async def go(
    model: Path, folder: Path, checkpoints: Path, *overrides: str, replicas: int = 1
) -> tuple[list[Any], Fleet]:
    """One process of a run; its records, and its fleet as it is at the end."""
    config = RunConfig.load(
        EXEMPLAR,
        [
            "checkpointing.enabled=true", f"checkpointing.checkpoint_dir={checkpoints}",
            f"grpo.max_num_steps={STEPS}", f"cluster.num_replicas={replicas}",
            "policy.optimizer.kwargs.lr=1e-2", "checkpointing.keep_top_k=null",
            *overrides,
        ],
    )  # fmt: skip
    found = Checkpoints(config)
    with EventLog(folder / "events.jsonl") as log:
        place = Place(config, model, folder, FakeChat(), log, found, found.latest())  # type: ignore[arg-type]
        made = place.fleet(war=True)
        refit = config.policy.generation.war.refit
        fleet = Fleet(made.spec, replicas, 1, refit, epoch=made.epoch)
        await fleet.start()
        await LivePass(place, fleet, "war").run()
        await fleet.stop()
    return list(read(folder / "events.jsonl").records), fleet


def of(records: list[Any], kind: type[Any]) -> list[Any]:
    return [record for record in records if isinstance(record, kind)]


def info(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / f"step_{step}" / "training_info.json").read_text())


def drafter(fleet: Fleet, replica: int = 0) -> SuffixProposer:
    return fleet._actors.replicas[replica]._engine.model_runner.drafter


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("done", [1, 3])
async def test_a_run_in_two_parts_is_to_the_bit_one_in_a_single_go(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int, turns: int
) -> None:
    """But that texts that came in turn by turn, one beside the other, come back one after the other:
    of equal places the newest are looked at, and those are others then."""
    monkeypatch.setattr(Toy, "turns", turns)
    straight, whole = await go(model, tmp_path / "whole", tmp_path / "one")
    first, _ = await go(model, tmp_path / "first", tmp_path / "two", f"grpo.max_num_steps={done}")
    second, resumed = await go(model, tmp_path / "second", tmp_path / "two")

    digests = [info(tmp_path / "one", step)["weights_digest"] for step in range(1, STEPS + 1)]
    assert len(set(digests)) == STEPS, "each step moves the policy"
    assert digests == [info(tmp_path / "two", step)["weights_digest"] for step in range(1, STEPS + 1)]
    for name in ("weights", "optimizer"):
        ended = [tmp_path / which / f"step_{STEPS}/policy/{name}.safetensors" for which in ("one", "two")]
        assert ended[0].read_bytes() == ended[1].read_bytes()

    assert [each.steps for each in of(second, BeginRecord)] == [STEPS]
    assert of(first, ResumeRecord) == of(straight, ResumeRecord) == []
    (record,) = of(second, ResumeRecord)
    assert (record.step, record.epoch, record.weights_digest) == (done, done + 1, digests[done - 1])
    assert record.checkpoint == str(tmp_path / "two" / f"step_{done}")
    assert [each.step for each in of(second, StepRecord)] == list(range(done, STEPS))
    assert [each.epoch for each in of(second, RefitRecord)] == list(range(done + 1, STEPS + 2))
    for kind in (StepRecord, TurnRecord, *[ReplicaRecord] * (turns == 1)):
        both = [of(each, kind) for each in ([*first, *second], straight)]
        if turns > 1 and kind is TurnRecord:  # which of two ends first is up to the machine
            both = [sorted(each, key=lambda turn: (turn.trajectory, turn.turn)) for each in both]
        assert [strip(each) for each in both[0]] == [strip(each) for each in both[1]]
    drafted = [
        [each.draft_tokens for each in of(records, ReplicaRecord)]
        for records in ([*first, *second], straight)
    ]
    assert drafted[0] == pytest.approx(drafted[1], rel=0.05)

    before, after = (drafter(each).history for each in (whole, resumed))
    assert after.export_sequences().trajectories == before.export_sequences().trajectories
    assert np.array_equal(after.export_sequences().epochs, before.export_sequences().epochs)
    for mine, theirs in zip(after.calibration, before.calibration, strict=True):
        assert np.array_equal(mine, theirs) or turns > 1
    assert after.calibration.reliability.sum() > 0


def strip(record: Any) -> dict[str, Any]:
    """A record without what a clock says."""
    return {name: getattr(record, name) for name in record.__slots__ if not name.endswith(("_s", "_seconds"))}


async def test_the_first_draws_of_a_resumed_run_are_not_those_of_the_first_steps(
    model: Path, tmp_path: Path
) -> None:
    _, first = await go(model, tmp_path / "a", tmp_path / "c", "grpo.max_num_steps=2", replicas=2)
    _, second = await go(model, tmp_path / "b", tmp_path / "c", replicas=2)
    seeds = [fleet.spec.engine_arguments(replica)["seed"] for fleet in (first, second) for replica in (0, 1)]
    assert len(set(seeds)) == 4


async def test_only_every_so_many_steps_and_the_last_are_saved(model: Path, tmp_path: Path) -> None:
    await go(model, tmp_path / "a", tmp_path / "c", "checkpointing.save_period=3")
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step_3", "step_4"]


async def test_placement_goes_on_with_what_it_learned(model: Path, tmp_path: Path) -> None:
    await go(model, tmp_path / "a", tmp_path / "c", "grpo.max_num_steps=2")
    await go(model, tmp_path / "b", tmp_path / "c")
    state = snapshot.read(tmp_path / "c" / f"step_{STEPS}/war/scheduler.state")
    trajectories = STEPS * 3 * 4
    assert state.arrays["progress/lives/ended"].sum() == trajectories
    assert state.arrays["progress/all/totals"][0] == 2 * trajectories


async def test_a_replica_more_starts_empty_and_one_less_is_no_harm(model: Path, tmp_path: Path) -> None:
    await go(model, tmp_path / "a", tmp_path / "c", "grpo.max_num_steps=1")
    _, more = await go(model, tmp_path / "b", tmp_path / "c", "grpo.max_num_steps=2", replicas=2)
    assert all(drafter(more, number).history.stats().trajectories for number in (0, 1))
    _, fewer = await go(model, tmp_path / "d", tmp_path / "c", "grpo.max_num_steps=3")
    assert drafter(fewer).history.stats().epochs == 3


async def test_an_earlier_runs_history_is_taken_in_at_the_start_and_needed_no_more(
    model: Path, tmp_path: Path
) -> None:
    await go(model, tmp_path / "earlier", tmp_path / "old", "grpo.max_num_steps=1")
    key = f"policy.generation.war.speculative.history.restore={tmp_path / 'earlier'}"
    _, first = await go(model, tmp_path / "a", tmp_path / "c", "grpo.max_num_steps=1", key)
    shutil.rmtree(tmp_path / "earlier")
    _, second = await go(model, tmp_path / "b", tmp_path / "c", "grpo.max_num_steps=2", key)
    for fleet, own in ((first, 12), (second, 24)):
        names = drafter(fleet).history.export_sequences().trajectories
        assert sum(name.startswith("restored/") for name in names) == 12
        assert sum(name.startswith("war-live0/") for name in names) == own == len(names) - 12


async def test_a_checkpoint_that_cannot_be_written_costs_itself_and_neither_the_run_nor_those_before(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save, saved = SuffixProposer.save_learned, []

    def full_twice(self: SuffixProposer, stem: str) -> None:
        saved.append(stem)
        if len(saved) in (2, 3):
            Path(f"{stem}.suffixes").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(self, stem)

    monkeypatch.setattr(SuffixProposer, "save_learned", full_twice)
    records, _ = await go(model, tmp_path / "a", tmp_path / "c")
    assert [each.step for each in of(records, StepRecord)] == list(range(STEPS))
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step_1", "step_4"]
    attempts = of(records, CheckpointRecord)
    assert [(each.step, "No space left" in each.error) for each in attempts] == [
        (1, False), (2, True), (3, True), (4, False),
    ]  # fmt: skip
    warnings = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert len(warnings) == 2
    for step, line in zip((2, 3), warnings, strict=True):
        assert f"step_{step} could not be written" in line
        assert f"make room in {tmp_path / 'c'}" in line


async def test_what_a_replica_cannot_use_ends_the_run_before_its_first_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await go(model, tmp_path / "a", tmp_path / "c", "grpo.max_num_steps=1")
    monkeypatch.setattr(f"{__name__}.WORDS", 4)
    with pytest.raises(UserError, match="beyond this model's vocabulary of 4"):
        await go(model, tmp_path / "b", tmp_path / "c")


async def test_the_history_in_a_checkpoint_is_one_that_tools_read(model: Path, tmp_path: Path) -> None:
    await go(model, tmp_path / "a", tmp_path / "c", "grpo.max_num_steps=1")
    sequences = read_archive(str(tmp_path / "c/step_1/war/replica-0.suffixes"))
    assert len(sequences.trajectories) == 12
    assert set(sequences.epochs.tolist()) == {1}
