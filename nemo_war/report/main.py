"""`nemo-war report RUN`: read a run's log and show it, to a person or to a program."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from nemo_war.report.summary import summarize, to_json
from nemo_war.report.table import WIDTH, print_report
from nemo_war.telemetry.log import FILE_NAME, read


def report(run: Path, as_json: bool) -> int:
    """Print the report of one run to standard output.

    Args:
        run: folder of the run, a link to it (`runs/latest`), or its event log.
        as_json: print what `summary.json` holds instead of the table.

    Returns:
        The exit status: 0, or 1 when the log holds no finished step.

    Raises:
        UserError: there is no log to read.
    """
    stream = read(run if run.is_file() else run / FILE_NAME)
    summary = summarize(stream.records, stream.damage)
    if as_json:
        sys.stdout.write(to_json(summary))
    else:
        print_report(summary, run, _console())
    return 0 if summary["modes"] or summary["live"] else 1


def _console() -> Console:
    """Standard output at the width the report is laid out for, or the terminal's if that is less."""
    console = Console()
    return Console(width=min(WIDTH, console.width) if console.is_terminal else WIDTH)
