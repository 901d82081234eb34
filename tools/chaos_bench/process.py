"""One process of `nemo-war`, watched by what it says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PATIENCE_S = 420.0
"""Longest wait for anything: a start takes seconds, on a machine with other work a minute."""
_ROLLED = "live rollouts: done"


class OffPlanError(Exception):
    """It did not say, or end, in time, or ended before its time."""


class Command:
    """A process that runs; its standard error is read as it comes.

    Attributes:
        first_step_s: from its start to the end of its first step's rollouts; None before.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._began = time.monotonic()
        # A group of its own, as a terminal gives it: Ctrl-C goes to all of it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nemo_war.cli", *arguments],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
        )
        self.first_step_s: float | None = None
        self._lines: list[str] = []
        self._news, self._ended = threading.Condition(), False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, said: str) -> None:
        """Until it has said something.

        Raises:
            OffPlanError: it did not in time, or ended without.
        """

        deadline = time.monotonic() + _PATIENCE_S
        with self._news:
            while not any(said in line for line in self._lines):
                if self._ended:
                    raise OffPlanError(f"it ended before it said {said!r}; {self.tail}")
                if time.monotonic() > deadline:
                    raise OffPlanError(f"it never said {said!r}; {self.tail}")
                self._news.wait(1.0)

    def signal(self, signum: signal.Signals, group: bool = False) -> None:
        """Send it one, or to its whole group.

        Raises:
            OffPlanError: it has ended.
        """
        if self._process.poll() is not None:
            raise OffPlanError(f"it was over before it could be struck; {self.tail}")
        (os.killpg if group else os.kill)(self._process.pid, signum)

    def end(self) -> int:
        """Its exit status, minus a signal's number where one ended it.

        Raises:
            OffPlanError: it does not end.
        """
        try:
            status = self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise OffPlanError(f"it does not end; {self.tail}") from None
        self._reader.join(10)  # which ends later where a child outlives it
        return status

    @property
    def stderr(self) -> str:
        """All that it has said."""
        with self._news:
            return "".join(self._lines)

    @property
    def tail(self) -> str:
        """The last lines, for a message."""
        return " | ".join(line.rstrip() for line in self._lines[-8:])

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._news:
                self._lines.append(line)
                if self.first_step_s is None and _ROLLED in line:
                    self.first_step_s = time.monotonic() - self._began
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()
