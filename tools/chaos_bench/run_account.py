"""The accounts of a job that took several processes: which steps were done, and which are on record."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nemo_war.telemetry.log import EventStream
from nemo_war.telemetry.records import ResumeRecord, StepRecord

_DONE = re.compile(r"step (\d+)/\d+: \d+ tokens in ")
_RESUMED = re.compile(r"resuming from .*: (\d+) of \d+ steps are done")


@dataclass(frozen=True, slots=True)
class Part:
    """What one process of a job did.

    Attributes:
        resumed: steps that were done when it began, by its own account.
        steps: that it did, in order, from 0.
    """

    resumed: int
    steps: tuple[int, ...]

    @property
    def without_last(self) -> Part:
        """The same without its last step."""
        return Part(self.resumed, self.steps[:-1])


def on_record(stream: EventStream) -> Part:
    """A process's part by its event log."""
    resumed = [each.step for each in stream.records if isinstance(each, ResumeRecord)]
    steps = [
        each.step for each in stream.records if isinstance(each, StepRecord) and each.run.phase == "live"
    ]
    return Part(resumed[0] if resumed else 0, tuple(steps))


def as_said(stderr: str) -> Part:
    """A process's part by what it told its user, which no full disk touches."""
    resumed = _RESUMED.search(stderr)
    return Part(int(resumed[1]) if resumed else 0, tuple(int(each) - 1 for each in _DONE.findall(stderr)))


def surviving(parts: Iterable[Part]) -> list[int]:
    """The steps of the job: those of a process behind the checkpoint that the next went on from are not."""
    steps: list[int] = []
    for part in parts:
        steps = [step for step in steps if step < part.resumed] + list(part.steps)
    return steps


def lost(steps: Sequence[int], total: int) -> list[str]:
    """Those that nobody did."""
    return [f"step {step} was never done" for step in range(total) if step not in steps]


def duplicated(steps: Sequence[int]) -> list[str]:
    """Those that were done again although they need not have been."""
    return [f"step {step} was done {times} times" for step, times in Counter(steps).items() if times > 1]
