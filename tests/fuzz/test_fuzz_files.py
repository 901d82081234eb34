"""Whatever a file holds: it is refused in one line, or what is read of it is sound. Nothing else happens."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
from budget import BUDGETS, replayable, seeds
from mutation import changed, damaged, dumped

from nemo_war import checked_file, snapshot
from nemo_war.config import StepTimePrior
from nemo_war.errors import UserError
from nemo_war.generation.embedded import training_info
from nemo_war.generation.embedded.checkpoint import Checkpoints, restore_policy, save_policy
from nemo_war.generation.embedded.config import RunConfig
from nemo_war.generation.embedded.training_info import TrainingInfo
from nemo_war.generation.step_time import StepTimeModel
from nemo_war.routing.workload_aware import WorkloadAware
from nemo_war.speculative import archive, learned
from nemo_war.speculative.history import SuffixHistory
from nemo_war.speculative.learned import Tables
from nemo_war.speculative.pricing import DraftPricer
from nemo_war.telemetry import log
from nemo_war.telemetry.log import EventLog
from nemo_war.telemetry.records import ExchangeRecord, Pass, Record

ROOT = Path(__file__).parents[2]
EXEMPLAR = ROOT / "examples/configs/grpo_embedded_cpu.yaml"
MOST_TIMES, MOST_BESIDES = 64, 4 << 20
"""Memory that reading a file may take: so many times its size, and so many bytes in any case. A JSON text of
`{},{},…` is the worst: three bytes stand for an object of 64."""
MEASURED = 40
"""One case in so many is measured, as that makes it several times slower."""


class Files:
    """Real files of each kind, and what reads them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.history = folder, SuffixHistory(4096, 4)
        self.histories = [self._history(size) for size in (0, 1, 3, 12)]
        self._checkpoint()
        self.states = [path.read_bytes() for path in (folder / "real").rglob(f"*{snapshot.SUFFIX}")]
        self.log = self._log()
        self.readers: list[Callable[[random.Random], None]] = [
            self.read_history, self.read_state, self.read_checkpoint, self.read_log,
        ]  # fmt: skip

    def read_history(self, chance: random.Random) -> None:
        """As bytes of another replica, and as a file, into a history that already holds something."""
        content = _broken(chance, archive.KIND, chance.choice(self.histories), self.histories)
        path = self.folder / "x.suffixes"
        path.write_bytes(content)
        self.history = SuffixHistory(chance.choice((64, 1024, 4096)), 4)
        before = self.history.stats()
        try:
            sequences = archive.decode(content, "of a peer")
            sequences.check_vocabulary(1 << 20, "of a peer")
            self.history.import_sequences(sequences)
            self.history.load(str(path), 1 << 20, chance.choice((0, 3, 1 << 30)))
            self.history.restore(str(path), 1 << 20)
        except UserError:
            assert self.history.stats() == before
        self.history.check_integrity()
        assert self.history.stats().tokens <= 4096

    def read_state(self, chance: random.Random) -> None:
        """As a drafter's, and as a scheduler's."""
        content = _broken(chance, snapshot.KIND, chance.choice(self.states), self.states)
        for name in ("war/scheduler.state", "war/replica-0.state"):
            (self.folder / "draft" / name).write_bytes(content)
        for read in (
            lambda: learned.check(str(self.folder / "draft/war/replica-0")),
            lambda: restore_policy(self.folder / "draft/war", WorkloadAware()),
        ):
            _refused_or_right(read)

    def read_checkpoint(self, chance: random.Random) -> None:
        """With an info that was changed and signed again."""
        folder = self.folder / "checkpoints/step_3"
        fields = json.loads((self.folder / "real/training_info.json").read_text())
        del fields["checksum"]
        if chance.random() < 0.8:
            fields = changed(chance, fields)
        text = _signed(fields) if isinstance(fields, dict) else dumped(chance, fields)
        if chance.random() < 0.2:
            text = damaged(chance, text, [text])
        (folder / training_info.FILE_NAME).write_bytes(text)
        _refused_or_right(lambda: self.checkpoints.latest())

    def read_log(self, chance: random.Random) -> None:
        """Line by line: what is read is written as it was read."""
        lines = self.log.split(b"\n")
        for _ in range(chance.randrange(4)):
            place = chance.randrange(len(lines))
            try:
                lines[place] = dumped(chance, changed(chance, json.loads(lines[place])))
            except (ValueError, RecursionError):
                lines[place] = damaged(chance, lines[place], lines)
        content = b"\n".join(lines)
        if chance.random() < 0.5:
            content = damaged(chance, content, [self.log])
        path = self.folder / "events.jsonl"
        path.write_bytes(content)
        try:
            stream = log.read(path)
        except UserError:
            return
        first, second = (self._rewritten(path) for _ in range(2))  # the first cuts texts that are too long
        assert len(first) == len(stream.records)
        assert repr(first) == repr(second)  # as text: a NaN is not equal to itself
        assert len(stream.damage) <= 2 * log.MAX_LISTED
        assert all(sentence.isprintable() and len(sentence) < 2000 for sentence in stream.damage)

    def _rewritten(self, path: Path) -> tuple[Record, ...]:
        """What is read of a log once what was read of it has been written."""
        records = log.read(path).records
        path.write_bytes(b"".join(map(log.encode, records)) or b"\n")
        return log.read(path).records

    def _history(self, size: int) -> bytes:
        history, texts = SuffixHistory(4096, 4), np.random.default_rng(size)
        for number in range(size):
            tokens = texts.integers(0, 99, int(texts.integers(1, 300))).astype(np.int32)
            slot = history.begin(f"t{number}", f"g{number % 2}", number, tokens)
            history.extend(np.array([slot], np.int32), np.full((1, 1), 7, np.int32), np.ones(1, np.int32))
            history.end(slot)
        return archive.encode(history.export_sequences())

    def _checkpoint(self) -> None:
        own = ["checkpointing.enabled=true", f"checkpointing.checkpoint_dir={self.folder / 'checkpoints'}"]
        config = RunConfig.load(EXEMPLAR, [*own, "grpo.max_num_steps=9"])
        self.checkpoints = Checkpoints(config)
        self.checkpoints.folder.mkdir(parents=True)
        with self.checkpoints.new(TrainingInfo.of(config, 3, 4, "digest")) as draft:
            (draft / "policy/weights.safetensors").write_bytes(bytes(range(200)))
            history, step_time = SuffixHistory(1024, 4), StepTimeModel(StepTimePrior())
            history.end(history.begin("t", "g", 0, np.arange(100, dtype=np.int32)))
            tables = Tables(history.calibration, step_time, DraftPricer(step_time))
            learned.save(str(draft / "war/replica-0"), history, tables)
            save_policy(draft / "war", WorkloadAware().state())
        for copy in ("real", "draft"):
            shutil.copytree(self.checkpoints.folder / "step_3", self.folder / copy)

    def _log(self) -> bytes:
        here = Pass("war", "live", 0)
        with EventLog(self.folder / "real.jsonl") as events:
            for number in range(4):
                events.append(ExchangeRecord(here, number, "step", 1, 10, 0.5, 0, 0))
        return (self.folder / "real.jsonl").read_bytes()


def _broken(chance: random.Random, kind: checked_file.Kind, content: bytes, others: list[bytes]) -> bytes:
    """A checked file that is damaged; mostly with the right digest, so that what is behind it is reached."""
    if chance.random() < 0.1:
        return damaged(chance, content, others)
    body = checked_file.unpack(kind, content, "")
    head, _, data = body.partition(b"\n")
    if chance.random() < 0.6:
        header = json.loads(head)
        for _ in range(chance.choice((1, 1, 2, 4))):
            header = changed(chance, header)
        body = dumped(chance, header) + b"\n" + data
    if chance.random() < 0.4:
        body = damaged(chance, body, others)
    return checked_file.pack(kind, body)


def _signed(fields: dict) -> bytes:
    """A training info as it is written."""

    def text(these: dict) -> bytes:
        return json.dumps(these, indent=1, sort_keys=True).encode() + b"\n"

    return text({**fields, "checksum": hashlib.blake2b(text(fields)).hexdigest()})


def _refused_or_right(read: Callable[[], object]) -> None:
    said = ""
    try:
        read()
    except UserError as error:
        said = str(error)
    assert "\n" not in said


@BUDGETS
def test_every_reader_refuses_what_it_cannot_use(seconds: float, tmp_path: Path) -> None:
    files = Files(tmp_path)
    for seed in seeds(seconds):
        with replayable(seed) as chance:
            read = files.readers[seed % len(files.readers)]
            if seed // len(files.readers) % MEASURED:
                read(chance)
            else:
                _measured(read, chance, tmp_path)


def _measured(read: Callable[[random.Random], None], chance: random.Random, folder: Path) -> None:
    tracemalloc.start()
    try:
        read(chance)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = max(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert peak <= MOST_TIMES * size + MOST_BESIDES
