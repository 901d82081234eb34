"""The records of a run, sorted by pass: one mode over one piece of work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nemo_war.telemetry.records import (
    BeginRecord,
    CheckpointRecord,
    ExchangeRecord,
    JobReplicaRecord,
    OutageRecord,
    Pass,
    Record,
    RefitRecord,
    ReliabilityRecord,
    ReplicaRecord,
    ResumeRecord,
    StepRecord,
    TransitionRecord,
    TurnRecord,
)

MODES = ("baseline", "sticky", "war")
"""The order in which modes are shown; the first one present is what the others are checked against."""


@dataclass(frozen=True, slots=True)
class PassRecords:
    """The records of one pass, in the order they were written."""

    run: Pass
    turns: tuple[TurnRecord, ...]
    replicas: tuple[ReplicaRecord, ...]
    steps: tuple[StepRecord, ...]
    refits: tuple[RefitRecord, ...]
    begins: tuple[BeginRecord, ...] = ()
    reliability: tuple[ReliabilityRecord, ...] = ()
    resumes: tuple[ResumeRecord, ...] = ()
    checkpoints: tuple[CheckpointRecord, ...] = ()
    exchanges: tuple[ExchangeRecord, ...] = ()
    outages: tuple[OutageRecord, ...] = ()

    @classmethod
    def of(cls, run: Pass, records: Sequence[Record]) -> PassRecords:
        """Sort the records of one pass by kind."""
        return cls(
            run,
            turns=tuple(r for r in records if isinstance(r, TurnRecord)),
            replicas=tuple(r for r in records if isinstance(r, ReplicaRecord)),
            steps=tuple(r for r in records if isinstance(r, StepRecord)),
            refits=tuple(r for r in records if isinstance(r, RefitRecord)),
            begins=tuple(r for r in records if isinstance(r, BeginRecord)),
            reliability=tuple(r for r in records if isinstance(r, ReliabilityRecord)),
            resumes=tuple(r for r in records if isinstance(r, ResumeRecord)),
            checkpoints=tuple(r for r in records if isinstance(r, CheckpointRecord)),
            exchanges=tuple(r for r in records if isinstance(r, ExchangeRecord)),
            outages=tuple(r for r in records if isinstance(r, OutageRecord)),
        )

    @property
    def name(self) -> str:
        """How sentences call this pass."""
        return f"{self.run.mode} " + ("live" if self.run.phase == "live" else f"repeat {self.run.repeat}")

    @property
    def makespan_s(self) -> float:
        """Seconds spent on rollouts, over all steps; training and refits are not in it."""
        return sum(step.rollout_s for step in self.steps)

    @property
    def output_tokens(self) -> int:
        """Tokens generated and kept, by the turns' own account."""
        return sum(turn.output_tokens for turn in self.turns)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, cached or not, by the turns' own account."""
        return sum(turn.prompt_tokens for turn in self.turns)

    @property
    def truncations(self) -> int:
        """Trajectories cut off by a limit."""
        return sum(step.truncations for step in self.steps)

    @property
    def errors(self) -> int:
        """Requests that failed."""
        return sum(step.errors for step in self.steps)


def by_pass(records: Iterable[Record]) -> list[PassRecords]:
    """Group by pass, modes in the order of `MODES`.

    Validation rollouts are nobody's work, and what NeMo-RL's jobs write down belongs to no pass.
    """
    groups: dict[Pass, list[Record]] = defaultdict(list)
    for record in records:
        if isinstance(record, TransitionRecord | JobReplicaRecord) or record.run.phase == "validation":
            continue
        groups[record.run].append(record)
    passes = [PassRecords.of(run, group) for run, group in groups.items()]
    return sorted(passes, key=lambda p: (_rank(p.run.mode), p.run.phase, p.run.repeat))


def _rank(mode: str) -> tuple[int, str]:
    return (MODES.index(mode) if mode in MODES else len(MODES), mode)
