"""What all parts of the benchmark are given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.routing_bench.scenarios import Workloads


@dataclass(frozen=True, slots=True)
class Bench:
    """Its settings.

    Attributes:
        workloads: of the traces.
        peers: folder of the peers' programs; None leaves them out.
        seeds: how many.
        scenarios: that run in process.
        http: that run over HTTP.
        folder: for logs and results.
    """

    workloads: Workloads
    peers: Path | None
    seeds: int
    scenarios: Sequence[str]
    http: Sequence[str]
    folder: Path

    def note(self, part: str, **facts: Any) -> None:
        """Keep a run as soon as it is over: all runs of a long part may be lost otherwise."""
        line = json.dumps({"part": part, **facts})
        print(line, flush=True)
        with (self.folder / "runs.jsonl").open("a") as file:
            file.write(line + "\n")
