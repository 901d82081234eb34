"""The event log of a NeMo-RL job: `nemo_war/events.jsonl` under the folder of its own logs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nemo_war.errors import UserError
from nemo_war.telemetry.log import FILE_NAME, EventLog
from nemo_war.telemetry.records import Record

_FOLDER = "nemo_war"


class Events:
    """One log, written by the process that knows where the job's logs are."""

    def __init__(self) -> None:
        """Write nothing until there is a folder."""
        self._folder: Path | None = None
        self._log: EventLog | None = None

    def begin(self, folder: Path) -> None:
        """From now on records go to a log under this folder, which is made with the first of them."""
        self._folder, self._log = folder / _FOLDER, None

    def append(self, records: Iterable[Record]) -> None:
        """Write records. A log that cannot be begun costs records, never the job."""
        if self._folder is not None:
            try:
                self._log = EventLog(self._folder / FILE_NAME)
            except UserError as error:
                print(f"nemo_war: no event log: {error}", flush=True)
            self._folder = None
        if self._log is not None:
            for record in records:
                self._log.append(record)


log = Events()
"""The process's own."""


def noting(next_folder: Callable[..., Any]) -> Callable[..., Any]:
    """NeMo-RL's choice of a folder for a job's logs, which ours goes to as well."""

    def get_next_experiment_dir(*arguments: Any, **options: Any) -> Any:
        folder = next_folder(*arguments, **options)
        log.begin(Path(folder))
        return folder

    return get_next_experiment_dir
