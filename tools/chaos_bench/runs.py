"""Faults of whole runs: `nemo-war run` is stopped, or robbed of its disk or checkpoint, and started again.

Each fault has a job of its own, with a fake engine, the real trainer on a tiny policy, and folders that
are gone over when all its processes have ended.
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from nemo_war.cli import main
from nemo_war.telemetry.log import FILE_NAME, EventStream, read
from nemo_war.telemetry.records import BeginRecord, CheckpointRecord, ResumeRecord
from tools.chaos_bench import faults, remains, run_account
from tools.chaos_bench.damage import checkpoints, damage, damaged, print_of, weights_digest
from tools.chaos_bench.disk import Disk, disk
from tools.chaos_bench.process import Command, OffPlanError
from tools.chaos_bench.run_plan import CORRUPT, STEPS, Moment, RunFault, drawn
from tools.chaos_bench.runs_result import RunsResult
from tools.chaos_bench.tiny import write_policy

INTERRUPTED = "nemo-war: interrupted"
_RECIPE = Path(__file__).parents[2] / "examples/configs/grpo_embedded_cpu.yaml"
_SETTINGS = (
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_rollout_turns=2",
    "policy.max_total_sequence_length=1024",
    "policy.optimizer.kwargs.lr=1e-3",
    "policy.generation.max_new_tokens=24",
    "policy.generation.vllm_kwargs.block_size=16",
    "env.file_edit=null",
    "checkpointing.enabled=true",
    "checkpointing.keep_top_k=null",
)
_SEED = 42
"""Of the first process's first engine, by which it knows its orders."""
_STEP_MS = 10
"""Of the engine: rollouts take long enough to be struck amid them."""
_GONE_S = 60.0
"""A killed run's processes notice by themselves, on a busy machine late."""
_RUN_DISK, _CHECKPOINT_DISK = 1 << 20, 16 << 20
_LOST_RECORDS = re.compile(r"WARNING: (\d+) records could not be written")


@dataclass(frozen=True, slots=True)
class RunsSettings:
    """What was asked for.

    Attributes:
        faults: how many.
        seed: of the plan.
        kinds: of faults.
        folder: for the jobs and their logs.
        replicas: of each run.
    """

    faults: int
    seed: int
    kinds: tuple[str, ...]
    folder: Path
    replicas: int = 1


class Runs:
    """All faults of a plan, one after the other."""

    def __init__(self, settings: RunsSettings) -> None:
        self._settings = settings
        self.result = RunsResult(settings.seed)

    def __call__(self) -> RunsResult:
        """Do it."""
        settings, began = self._settings, time.monotonic()
        folder = settings.folder.resolve() / "jobs"
        shutil.rmtree(folder, ignore_errors=True)
        model = write_policy(folder / "policy")
        for fault in drawn(settings.kinds, settings.faults, settings.seed):
            job = Job(fault, folder / f"{fault.number}-{fault.kind}", model, settings.replicas, self.result)
            wrong, late = len(self.result.wrong), self.result.late
            job()
            self.result.seconds = time.monotonic() - began
            survived = len(self.result.wrong) == wrong
            self.result.faults += survived and late == self.result.late
            print(
                f"chaos: {self.result.seconds:.0f} s, {'survived' if survived else 'NOT SURVIVED'}: "
                f"{fault.number} {fault.kind} {fault.damage or ''} at {fault.moment.said!r}",
                file=sys.stderr,
                flush=True,
            )
            for sentence in self.result.wrong[wrong:]:
                print(f"chaos:   {sentence}", file=sys.stderr, flush=True)
        return self.result


@dataclass
class Job:
    """One job, the fault that befalls it, and its end."""

    fault: RunFault
    folder: Path
    model: Path
    replicas: int
    result: RunsResult
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self._draw = Random(self.fault.seed)
        self._checkpoints = self.folder / "checkpoints"
        self._parts: list[run_account.Part] = []
        self._shared = remains.SharedMemory(self.mark)

    def __call__(self) -> None:
        """Do it, and look over what is left."""
        for seed in range(_SEED, _SEED + (STEPS + 2) * self.replicas):  # it grows with the steps
            faults.order(self.folder / "orders", seed, step_ms=_STEP_MS)
        kind = self.fault.kind
        act: Callable[[], int] = {
            "full_disk_run": self._full_run,
            "full_disk_checkpoints": self._full_checkpoints,
            CORRUPT: self._corrupt,
        }.get(kind, self._signalled)
        try:
            self._account(act())
        except OffPlanError as error:
            self._broken(str(error))
            for process in remains.marked(self.mark):
                process.kill()
        self._nothing_runs()
        self.result.orphans += map(self._said, self._shared.left())

    # The kinds of faults; each returns how many steps its job has

    def _signalled(self) -> int:
        signum = {"sigterm_run": signal.SIGTERM, "sigint_run": signal.SIGINT}.get(
            self.fault.kind, signal.SIGKILL
        )
        if self._interrupted("first", signum):
            self._resumed("second", STEPS)
        return STEPS

    def _corrupt(self) -> int:
        self._interrupted("first", signal.SIGTERM)
        *_, other, victim = checkpoints(self._checkpoints)
        assert self.fault.damage is not None
        name = damage(victim, self.fault.damage, self._draw, other)
        before = print_of(self._checkpoints)
        refused = self._start("refused", STEPS)
        status, errors = refused.end(), self._errors(refused)
        self._temporary.remove()
        remedy = "remove its folder step_N to go on from the one before, or name another checkpointing"
        self._promise(status == 2 and len(errors) == 1, f"status {status} of a damaged checkpoint: {errors}")
        self._promise(
            all(f"{victim}/{name}" in each and remedy in each for each in errors),
            f"{errors} does not name {name} and what to do",
        )
        self._promise(print_of(self._checkpoints) == before, "a damaged checkpoint was touched")
        self._promise(not (self.folder / "refused").exists(), "a refused run has a folder")
        shutil.rmtree(victim)
        self._resumed("second", STEPS)
        return STEPS

    def _full_run(self) -> int:
        """The log and the summary have no room; the job is done all the same."""
        with disk(self.folder / "disk", _RUN_DISK) as small:
            run = self._start("disk/first", STEPS)
            self._fill(run, small)
            status = run.end()
            self._promise(status == 0, f"status {status} on a full disk: {run.tail}")
            self._look_over("disk/first", run, status)
            if self.fault.end is None:
                self._promise("summary.json could not be written" in run.stderr, "no word of summary.json")
        return STEPS

    def _full_checkpoints(self) -> int:
        """Checkpoints have no room; the run goes on, and another one from what there is."""
        with disk(self._checkpoints, _CHECKPOINT_DISK) as small:
            run = self._start("first", STEPS)
            self._fill(run, small)
            status = run.end()
            self._promise(status == 0, f"status {status} on a full disk: {run.tail}")
            stream = self._look_over("first", run, status)
            failed = [each for each in stream.records if isinstance(each, CheckpointRecord) and each.error]
            self.result.unsaved += len(failed)
            warned = run.stderr.count("could not be written: ")
            self._promise(len(failed) == warned, f"{warned} warnings of {len(failed)} lost checkpoints")
            self._promise(bool(failed), "the disk was not full at any checkpoint")
            small.free()
            self._resumed("second", STEPS + 1)
            self._whole()
        return STEPS + 1

    # Parts of them

    def _interrupted(self, name: str, signum: signal.Signals) -> bool:
        """Whether it was: on a busy machine a signal may come when all steps are done."""
        run = self._start(name, STEPS)
        self._wait(run, self.fault.moment)
        before = run_account.as_said(run.stderr)
        run.signal(signum, group=signum == signal.SIGINT)
        status = run.end()
        if status == 0 and len(before.steps) == STEPS:
            self._look_over(name, run, status)
            self.result.late += 1
            return False
        if signum == signal.SIGKILL:
            self._promise(status == -signal.SIGKILL, f"status {status} of a killed run")
        else:
            last = run.stderr.rstrip().rpartition("\n")[2]
            self._promise((status, last) == (130, INTERRUPTED), f"status {status}, saying {run.tail}")
        self._look_over(name, run, status)
        return True

    def _resumed(self, name: str, steps: int) -> None:
        run = self._start(name, steps)
        status = run.end()
        self._promise(status == 0, f"status {status} of the resumed run: {run.tail}")
        stream = self._look_over(name, run, status)
        for record in stream.records:
            if isinstance(record, ResumeRecord):
                same = record.weights_digest == weights_digest(Path(record.checkpoint))
                self._promise(same, f"it went on with other weights than {record.checkpoint} has")
        if run.first_step_s is not None:
            self.result.recoveries[self.fault.kind].append(run.first_step_s)

    def _fill(self, run: Command, small: Disk) -> None:
        self._wait(run, self.fault.moment)
        small.fill()
        if self.fault.end is not None:
            self._wait(run, self.fault.end)
            small.free()

    def _wait(self, run: Command, moment: Moment) -> None:
        if moment.said.startswith(
            "step"
        ):  # looking takes long on a busy machine, and must not delay the fault
            run.wait_for("live rollouts: 0/")
            self._shared.look()
        run.wait_for(moment.said)
        time.sleep(moment.delay_s)

    def _start(self, name: str, steps: int) -> Command:
        self._temporary = remains.TemporaryFolder()
        environment = faults.environment(self.folder / "orders") | {
            remains.MARK: self.mark,
            "TMPDIR": str(self._temporary.path),
            "OMP_NUM_THREADS": "1",  # a tiny policy gains nothing by more
        }
        self.result.runs += 1
        return Command(
            [
                "run",
                str(_RECIPE),
                f"policy.model_name={self.model}",
                f"grpo.seed={_SEED}",
                f"grpo.max_num_steps={steps}",
                f"cluster.num_replicas={self.replicas}",
                f"checkpointing.checkpoint_dir={self._checkpoints}",
                "checkpointing.save_period=1",
                *_SETTINGS,
                "--run-dir",
                str(self.folder / name),
            ],
            environment,
        )

    # What must hold

    def _look_over(self, name: str, run: Command, status: int) -> EventStream:
        """The end of one process: its log, its report, its checkpoints, its remains."""
        folder = self.folder / name
        (self.folder / f"{name.replace('/', '-')}.stderr").write_text(run.stderr)
        if not (folder / FILE_NAME).exists():
            self._promise(status != 0, "a run has no log")
            return EventStream((), ())
        stream, killed = read(folder / FILE_NAME), status == -signal.SIGKILL
        told = [int(each) for each in _LOST_RECORDS.findall(run.stderr)]
        self.result.told += sum(told)
        full = [each for each in stream.damage if "could not be written here" in each]
        others = [each for each in stream.damage if each not in full and not (killed and "cut off" in each)]
        self._promise(not others, f"its log is damaged: {others}")
        self._promise(bool(told) or not full, f"its log lacks records that it did not tell of: {full}")
        recorded, said = run_account.on_record(stream), run_account.as_said(run.stderr)
        if not told:
            # Who is stopped may have written a step and not have said so.
            same = recorded == said if status == 0 else said in (recorded, recorded.without_last)
            self._promise(same, f"on record {recorded}, but said {said}")
        part = said if told else recorded
        self._parts.append(part)
        self._reports(folder, stream, recorded)
        self._whole(killed)
        if not killed:
            self._tidy(folder)
        self._nothing_runs()
        if not killed:
            self.result.orphans += map(self._said, self._temporary.left())
        self._temporary.remove()
        return stream

    def _nothing_runs(self) -> None:
        self.result.orphans += map(self._said, remains.processes(self.mark, patience_s=_GONE_S))

    def _reports(self, folder: Path, stream: EventStream, recorded: run_account.Part) -> None:
        """The folder of any run gives a report, which says what is missing."""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            status = main(["report", str(folder)])
        expected = 0 if recorded.steps else 1
        self._promise(status == expected, f"status {status} of a report on {recorded}")
        begun = [each for each in stream.records if isinstance(each, BeginRecord)]
        if begun and set(range(recorded.resumed, begun[0].steps)) - set(recorded.steps):
            said = "steps are not on record" in " ".join(printed.getvalue().split())
            self._promise(said, "its report does not say which steps are missing")

    def _whole(self, killed: bool = False) -> None:
        """Every checkpoint is, and nothing else lies there but what who is killed cannot remove."""
        for checkpoint in checkpoints(self._checkpoints):
            for sentence in damaged(checkpoint):
                self._broken(sentence)
        if not killed and self._checkpoints.exists():
            drafts = [path.name for path in self._checkpoints.iterdir() if path.name.startswith("tmp_")]
            self.result.orphans += [self._said(f"{name} was left behind") for name in drafts]

    def _tidy(self, folder: Path) -> None:
        """No part of a file is left in a run's folder."""
        whole = re.compile(rf"{FILE_NAME}|summary\.json|history/replica-\d+\.suffixes")
        for path in folder.rglob("*"):
            if path.is_file() and not whole.fullmatch(name := str(path.relative_to(folder))):
                self.result.orphans.append(self._said(f"{name} was left behind"))

    def _account(self, steps: int) -> None:
        done = run_account.surviving(self._parts)
        lost = run_account.lost(done, steps)
        self.result.expected += steps
        self.result.found += steps - len(lost)
        self.result.lost += map(self._said, lost)
        self.result.duplicated += map(self._said, run_account.duplicated(done))

    def _errors(self, run: Command) -> list[str]:
        return [line for line in run.stderr.splitlines() if line.startswith("nemo-war: error: ")]

    def _promise(self, kept: bool, otherwise: str) -> None:
        if not kept:
            self._broken(otherwise)

    def _broken(self, sentence: str) -> None:
        self.result.broken.append(self._said(sentence))

    def _said(self, sentence: str) -> str:
        return f"fault {self.fault.number}, {self.fault.kind}: {sentence}"
