"""What a run has shown, as one line of JSON, and as a sentence where something is wrong."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

_SHOWN = 5
"""Findings of a sort that are printed in full."""


@dataclass
class Result:
    """The counts of a run, and all that is wrong with it.

    Attributes:
        faults: that were survived.
        together: of these, those that happened while another one was not over.
        recoveries: by kind, seconds from a fault to its victim serving again.
        refits: that completed; `left_behind` counts the replicas that had to be brought back after one.
        exchanges: of history between replicas.
        fallbacks: turns that were placed without the scheduler.
        started, finished, retried: turns; of `mixed` ones the tokens are of two policies or more.
        most_attempts: how often one turn was placed, at most.
        probed: answers of real replicas to the same prompt.
        memory: MiB per 1,000 faults, by process.
        lost, duplicated, stale, orphans: a sentence on each.
        unexplained: why replicas were fenced off that nothing had been done to.
        failure: why the run did not come to its end.
    """

    seed: int
    real: bool
    in_flight: str
    replicas: int
    faults: int = 0
    together: int = 0
    seconds: float = 0.0
    steps: int = 0
    refits: int = 0
    left_behind: int = 0
    exchanges: int = 0
    fallbacks: int = 0
    started: int = 0
    finished: int = 0
    retried: int = 0
    mixed: int = 0
    probed: int = 0
    most_attempts: int = 0
    recoveries: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    memory: dict[str, float | None] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    failure: str = ""

    @property
    def wrong(self) -> list[str]:
        """What must not have happened, in sentences; none where all is well."""
        found = {
            "lost": self.lost,
            "duplicated": self.duplicated,
            "stale": self.stale,
            "left over": self.orphans,
        }
        sentences = [f"the run failed: {self.failure}"] if self.failure else []
        for name, each in found.items():
            if each:
                more = f", and {len(each) - _SHOWN} more" if len(each) > _SHOWN else ""
                sentences.append(f"{len(each)} {name}: {'; '.join(each[:_SHOWN])}{more}")
        return sentences

    def to_json(self) -> dict[str, Any]:
        """See `tools.chaos` for the keys."""
        return {
            "engines": "real" if self.real else "fake",
            "seed": self.seed,
            "in_flight": self.in_flight,
            "replicas": self.replicas,
            "faults": self.faults,
            "together": self.together,
            "seconds": round(self.seconds, 1),
            "steps": self.steps,
            "refits": self.refits,
            "left_behind": self.left_behind,
            "exchanges": self.exchanges,
            "fallbacks": self.fallbacks,
            "started": self.started,
            "finished": self.finished,
            "retried": self.retried,
            "most_attempts": self.most_attempts,
            "mixed": self.mixed,
            "probed": self.probed,
            "lost": len(self.lost),
            "duplicated": len(self.duplicated),
            "stale_turns": len(self.stale),
            "orphans": len(self.orphans),
            "unexplained": len(self.unexplained),
            "memory_slope": self.memory,
            "recovery_s": {kind: figures(seconds) for kind, seconds in sorted(self.recoveries.items())},
        }


def figures(seconds: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(seconds), 2),
        "worst": round(max(seconds), 2),
        "faults": len(seconds),
    }
