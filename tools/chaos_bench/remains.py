"""What is left over when nothing should be."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from pathlib import Path

import psutil

MARK = "NEMO_WAR_CHAOS_MARK"
"""Variable in the environment of all processes that a run starts."""
_REPLICA = "VLLM_CPU_OMP_THREADS_BIND"
"""Variable that only replicas' processes have, and what they start."""
_SHARED = Path("/dev/shm")
_MAPPED = re.compile(r"/dev/shm/\S+")


def marked(mark: str, replicas_only: bool = False) -> list[psutil.Process]:
    """Processes of a run, this one aside."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except (psutil.Error, OSError):
            continue
        ours = environment.get(MARK) == mark and (not replicas_only or _REPLICA in environment)
        if ours and process.pid != os.getpid():
            found.append(process)
    return found


def processes(mark: str, replicas_only: bool = False, patience_s: float = 10.0) -> list[str]:
    """Those that do not go away."""
    deadline = time.monotonic() + patience_s
    while (left := marked(mark, replicas_only)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"process {_name(each)} was left behind" for each in left]


def actors(patience_s: float = 10.0) -> list[str]:
    """Actors that Ray believes to be alive, or to come."""
    from ray._private.state import actors as table

    deadline = time.monotonic() + patience_s
    while left := [each for each in table().values() if each["State"] != "DEAD"]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return [f"actor {each['ActorClassName']} {each['ActorID']} is {each['State']}" for each in left]


def memory_files(process: psutil.Process) -> list[str]:
    """Weights that a process still has a memory file of."""
    left = []
    try:
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                name = os.readlink(entry)
            except OSError:
                continue
            if name.startswith("/memfd:weights-"):
                left.append(f"process {process.pid} has {name} open")
    except OSError:
        pass
    return left


class TemporaryFolder:
    """A folder for the temporary files of one run, with a short name, as sockets are among them.

    Attributes:
        path: of the folder.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="chaos-"))

    def left(self) -> list[str]:
        """What replicas left in it."""
        left = self.path.glob("nemo-war-*")
        return [f"temporary folder {path} was left behind" for path in sorted(left)]

    def remove(self) -> None:
        """With all that is in it, as who is killed can tidy nothing."""
        shutil.rmtree(self.path, ignore_errors=True)


class SharedMemory:
    """Files in shared memory that a run's processes have mapped, by looking now and then."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._seen: set[Path] = set()

    def look(self) -> None:
        """See what is mapped now."""
        for process in marked(self._mark, replicas_only=True):
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text()
            except OSError:
                continue
            self._seen |= {Path(name) for name in _MAPPED.findall(maps)}

    def left(self) -> list[str]:
        """Those that are still there."""
        return [f"shared memory {path} was left behind" for path in sorted(self._seen) if path.exists()]


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({process.status()}) {' '.join(process.cmdline())[:60]}"
    except psutil.Error:
        return str(process.pid)
