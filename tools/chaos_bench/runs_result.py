"""What faults of whole runs have shown, as one line of JSON, and as a sentence where something is wrong."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tools.chaos_bench.result import figures


@dataclass
class RunsResult:
    """The counts, and all that is wrong.

    Attributes:
        faults: that were struck and survived.
        runs: processes of `nemo-war run` that were started.
        expected, found: steps of all jobs, and those of them that were done.
        late: signals that came when all steps were done, so that there was nothing to go on with.
        told: records that full disks cost, and that the run told of.
        unsaved: checkpoints that full disks cost, and that the run told of.
        recoveries: by kind, seconds from the start of the resumed process to its first rollouts' end.
        lost, duplicated, orphans: a sentence on each.
        broken: a sentence on each promise that was not kept: status, message, report, checkpoint, log.
    """

    seed: int
    faults: int = 0
    runs: int = 0
    expected: int = 0
    found: int = 0
    late: int = 0
    told: int = 0
    unsaved: int = 0
    seconds: float = 0.0
    recoveries: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """What must not have happened, in sentences; none where all is well."""
        return [*self.lost, *self.duplicated, *self.orphans, *self.broken]

    def to_json(self) -> dict[str, Any]:
        """See `tools.chaos` for the keys."""
        return {
            "seed": self.seed,
            "faults": self.faults,
            "runs": self.runs,
            "seconds": round(self.seconds, 1),
            "steps": {"expected": self.expected, "found": self.found},
            "late": self.late,
            "records_told_lost": self.told,
            "checkpoints_told_lost": self.unsaved,
            "lost": len(self.lost),
            "duplicated": len(self.duplicated),
            "orphans": len(self.orphans),
            "broken": len(self.broken),
            "recovery_s": {kind: figures(seconds) for kind, seconds in sorted(self.recoveries.items())},
        }
