"""A file in memory is shared with other processes, and gone with its block."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nemo_war.generation.memory_file import memory_file


def child(code: str, path: str) -> bytes:
    return subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=True).stdout


def test_another_process_reads_what_was_written():
    blob = np.arange(100_000, dtype=np.uint8)
    blob.flags.writeable = False  # as views into an object store are
    with memory_file("test") as file:
        file.write(blob)
        read = child("import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())", file.path)
    assert read == blob.tobytes()


def test_what_another_process_writes_is_read_here():
    with memory_file("test") as file:
        child("import sys, pathlib; pathlib.Path(sys.argv[1]).write_bytes(b'told')", file.path)
        assert file.read().tobytes() == b"told"


def test_it_is_gone_behind_its_block_though_something_failed():
    with pytest.raises(RuntimeError), memory_file("test") as file:
        raise RuntimeError
    assert not Path(file.path).exists()
