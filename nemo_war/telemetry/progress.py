"""Progress of long work: bars on a terminal, plain lines in a log file.

Everything goes to standard error, so that standard output stays clean for `--json`.

    with progress("step 1/4 rollouts", total=12) as bar:
        bar.advance()
    stage("replicas are ready")
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

SECONDS_BETWEEN_LINES = 5.0
"""Without a terminal: often enough to show life, seldom enough to leave a log readable."""


class Bar:
    """Counts units of work; what the body of `with progress(...)` gets.

    Attributes:
        done: units completed so far.
        total: units there are; None when unknown.
    """

    def __init__(self, total: int | None) -> None:
        self.done = 0
        self.total = total
        self.on_advance: Callable[[], None] = lambda: None

    def advance(self, count: int = 1) -> None:
        """`count` more units are done."""
        self.done += count
        self.on_advance()

    def __str__(self) -> str:
        return f"{self.done}" if self.total is None else f"{self.done}/{self.total}"


class Progress:
    """Writes progress to one console, with the seconds since this object was made.

    Bars may nest. Calls must come from one thread (an event loop is one).
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._zero = clock()

    def stage(self, message: str) -> None:
        """One line that stays, after the elapsed seconds."""
        elapsed = self._clock() - self._zero
        self._console.print(f"[{elapsed:7.1f} s] {message}", markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def progress(self, label: str, total: int | None = None) -> Iterator[Bar]:
        """Show units being completed; ends with a line saying how far it came and how long it took.

        Args:
            label: what is being done.
            total: units there are; None when unknown.
        """
        begin, ending, bar = self._clock(), "STOPPED at", Bar(total)
        try:
            with self._drawn(label, bar) if self._console.is_interactive else self._printed(label, bar):
                yield bar
            ending = "done"
        finally:
            self.stage(f"{label}: {ending} {bar} in {self._clock() - begin:.1f} s")

    @contextmanager
    def _drawn(self, label: str, bar: Bar) -> Iterator[None]:
        """A moving bar that disappears at the end, leaving the last line."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with RichProgress(*columns, console=self._console, transient=True) as display:
            task = display.add_task(label, total=bar.total)
            bar.on_advance = lambda: display.update(task, completed=bar.done)
            yield

    @contextmanager
    def _printed(self, label: str, bar: Bar) -> Iterator[None]:
        """A line at the start, then at most one every few seconds."""
        said = self._clock()
        self.stage(f"{label}: {bar}" if bar.total is not None else f"{label} ...")

        def say() -> None:
            nonlocal said
            if self._clock() - said >= SECONDS_BETWEEN_LINES and bar.done != bar.total:
                said = self._clock()
                self.stage(f"{label}: {bar}")

        bar.on_advance = say
        yield


_shared = Progress()
progress = _shared.progress
stage = _shared.stage
