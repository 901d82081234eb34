"""What a killed process leaves behind is found while it lives, and removed."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import psutil

from nemo_war.generation.embedded import shared_memory

HOLD = """
import mmap, sys
file = open(sys.argv[1], "w+b")
file.truncate(4096)
view = mmap.mmap(file.fileno(), 4096)
print("there", flush=True)
sys.stdin.read()
"""


def test_queues_and_registrations_of_a_killed_process_are_removed_and_nothing_else() -> None:
    queue, other = (Path(f"/dev/shm/{kind}_{uuid.uuid4().hex[:8]}") for kind in ("psm", "other"))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for path in (queue, other)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    known = [psutil.Process(process.pid) for process in processes]
    registration = Path(f"/dev/shm/__KMP_REGISTERED_LIB_{processes[0].pid}_{os.getuid()}")
    registration.touch()
    try:
        found = shared_memory.mapped(known) | shared_memory.registrations(known)
        for process in processes:
            process.kill()
            process.wait()
        assert queue.exists()
        shared_memory.remove(found)
        assert not queue.exists()
        assert not registration.exists()
        assert other.exists()
        assert shared_memory.mapped(known) == set(), "a process that is gone has nothing open"
        shared_memory.remove(found)
    finally:
        for process in processes:
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()
        for path in (queue, other, registration):
            path.unlink(missing_ok=True)
