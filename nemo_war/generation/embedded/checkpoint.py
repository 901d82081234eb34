"""Checkpoints: folders `step_N` that a run writes whole and goes on from.

    step_N/training_info.json           what it is, and the digest of every other file
    step_N/policy/                      master weights and the optimiser's moments
    step_N/war/replica-R.suffixes       what the drafter of each replica remembers
    step_N/war/replica-R.state          what it learned of acceptance and step times
    step_N/war/scheduler.state          what placement learned of trajectories

N is the number of steps that are done. A checkpoint is written as `tmp_step_N` beside the
others and gets its name when every byte of it is on the disk, so that whatever stops a
run leaves whole checkpoints only. What is read is compared with its digest first.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo_war import snapshot
from nemo_war.checked_file import sync
from nemo_war.errors import ConfigError, UserError
from nemo_war.generation import placement_file
from nemo_war.generation.embedded import training_info
from nemo_war.generation.embedded.config import RunConfig
from nemo_war.generation.embedded.training_info import FileFacts, TrainingInfo
from nemo_war.routing.policy import Policy
from nemo_war.routing.workload_aware import WorkloadAware
from nemo_war.snapshot import State
from nemo_war.speculative import archive, learned

POLICY, WAR = "policy", "war"
_SCHEDULER = f"scheduler{snapshot.SUFFIX}"
_NAME, _DRAFT = re.compile(r"step_([1-9]\d{0,8})"), "tmp_"


class NotSavedError(Exception):
    """A checkpoint could not be written, and nothing of it is left; the message says why."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that was found whole."""

    folder: Path
    info: TrainingInfo

    @property
    def policy(self) -> Path:
        """Folder of the trainer's files."""
        return self.folder / POLICY

    @property
    def war(self) -> Path:
        """Folder of what WAR learned; empty where it did not run."""
        return self.folder / WAR


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, config: RunConfig) -> None:
        """Those that `checkpointing` of the configuration means; nothing is read yet."""
        self._config = config
        self._settings = config.checkpointing
        self.folder = config.checkpointing.checkpoint_dir

    def due(self, done: int) -> bool:
        """Whether one is to be saved after so many steps."""
        return done % self._settings.save_period == 0 or done == self._config.grpo.max_num_steps

    def latest(self) -> Checkpoint | None:
        """The one to go on from, if there is any.

        Raises:
            UserError: it is damaged or another version's. An older one is not taken in its place,
                as that is for the user to decide. Or none could be written where they should be.
            ConfigError: it is another run's, or nothing is left to do.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            steps = self._steps()
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot hold checkpoints: {error.strerror}; set checkpointing.checkpoint_dir"
            ) from None
        if not os.access(self.folder, os.W_OK):
            raise UserError(f"{self.folder} may not be written to; set checkpointing.checkpoint_dir")
        if not steps:
            return None
        checkpoint = _read(self.folder / f"step_{steps[-1]}", steps[-1])
        self._compare(checkpoint)
        return checkpoint

    @contextlib.contextmanager
    def new(self, info: TrainingInfo) -> Iterator[Path]:
        """A folder to fill, with folders `policy` and `war` in it; at the end it is a checkpoint.

        Args:
            info: what it will be, without its files.

        Raises:
            NotSavedError: it could not be written, and nothing of it is left.
        """
        name = f"step_{info.step}"
        draft = self.folder / f"{_DRAFT}{name}"
        try:
            self._clear()
            for part in (draft, draft / POLICY, draft / WAR):
                part.mkdir(mode=0o700, parents=True)
            yield draft
            _seal(draft, info)
            os.replace(draft, self.folder / name)
            sync(self.folder)
        except OSError as error:
            raise NotSavedError(f"checkpoint {self.folder / name} could not be written: {error}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self._remove_oldest()

    def _steps(self) -> list[int]:
        """Of the checkpoints that are there, in order."""
        names = [entry.name for entry in self.folder.iterdir() if entry.is_dir()]
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def _compare(self, checkpoint: Checkpoint) -> None:
        anew = "or name another checkpointing.checkpoint_dir to start anew"
        info, steps = checkpoint.info, self._config.grpo.max_num_steps
        for key, here in training_info.must_agree(self._config).items():
            if info.config.get(key) != here:
                saved = json.dumps(info.config.get(key))
                allowed = f"allowed: {saved}, as in {checkpoint.folder}, which this run would go on from"
                raise ConfigError(key, here, allowed, f"set it so, {anew}")
        if info.step >= steps:
            allowed = f"allowed: above {info.step}, the steps that are done in {checkpoint.folder}"
            raise ConfigError("grpo.max_num_steps", steps, allowed, f"raise it, {anew}")

    def _clear(self) -> None:
        """Remove what runs that were killed left unfinished."""
        for draft in self.folder.glob(f"{_DRAFT}step_*"):
            shutil.rmtree(draft)

    def _remove_oldest(self) -> None:
        """Keep as many as are wanted; what is left of one that could not be removed goes next time."""
        keep = self._settings.keep_top_k
        with contextlib.suppress(OSError):
            for step in self._steps()[:-keep] if keep is not None else ():
                draft = self.folder / f"{_DRAFT}step_{step}"
                os.replace(self.folder / f"step_{step}", draft)  # half of one must not be taken for one
                shutil.rmtree(draft)


def save_policy(folder: Path, state: State | None) -> None:
    """Write what placement learned, if anything, into the `war` folder of a checkpoint.

    Raises:
        OSError: it could not be written.
    """
    placement_file.write(folder / _SCHEDULER, state)


def restore_policy(folder: Path, policy: Policy) -> None:
    """Let placement go on with what `save_policy` wrote, if it wrote anything.

    Raises:
        UserError: the file is damaged, or makes no sense.
    """
    placement_file.read(folder / _SCHEDULER, policy)


def _seal(folder: Path, info: TrainingInfo) -> None:
    """Write beside the files what they are, and put all of them on the disk."""
    facts = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        facts[name] = FileFacts(size=path.stat().st_size, blake2b=training_info.digest(path))
    training_info.write(folder, info.model_copy(update={"files": facts}))
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def _read(folder: Path, step: int) -> Checkpoint:
    """Read one, and compare everything in it with its digest.

    Raises:
        UserError: it is damaged or another version's.
    """
    info = training_info.read(folder)
    if info.step != step:
        raise training_info.refused(folder / training_info.FILE_NAME, f"it says step {info.step}")
    for name, facts in info.files.items():
        path = folder / name
        try:
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):  # a pipe would keep its reader waiting for ever
                raise training_info.refused(path, "not a file")
            if found.st_size != facts.size or training_info.digest(path) != facts.blake2b:
                raise training_info.refused(path, "damaged, its size or its checksum is wrong")
        except OSError as error:
            raise training_info.refused(path, error.strerror) from None
    for path in sorted(path for part in (POLICY, WAR) for path in (folder / part).rglob("*")):
        if not path.is_dir() and path.relative_to(folder).as_posix() not in info.files:
            raise training_info.refused(path, "not one of the checkpoint's files")
    checkpoint = Checkpoint(folder, info)
    for path in sorted(checkpoint.war.glob(f"*{archive.SUFFIX}")):
        learned.check(str(path.with_suffix("")))
    restore_policy(checkpoint.war, WorkloadAware())
    return checkpoint
