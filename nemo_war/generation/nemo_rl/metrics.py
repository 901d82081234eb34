"""`war/*`: what a step did, from the replicas' counters; NeMo-RL logs it under `train/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from nemo_war.generation.nemo_rl import arms
from nemo_war.telemetry.records import JobReplicaRecord

_PLACE = ("step", "epoch", "replica", "active")
_STATE = ("history_tokens",)
_COUNTED = tuple(field.name for field in fields(JobReplicaRecord) if field.name not in (*_PLACE, *_STATE))
"""Counters since the start, whose growth is the step's."""


class Steps:
    """Turns counters since the start into what steps did."""

    def __init__(self, ab_every: int | None) -> None:
        """Begin with nothing counted; `ab_every` as in the configuration."""
        self._ab_every = ab_every
        self._before: Sequence[Mapping[str, Any]] = ()
        self._steps = 0

    def take(self, statistics: Sequence[Mapping[str, Any]]) -> list[JobReplicaRecord]:
        """What happened since the last call, which was at the end of the step before.

        Args:
            statistics: of each replica; see `worker.Host.statistics`. Without a drafter it has no counters.
        """
        before = self._before or [{}] * len(statistics)
        self._before, step = statistics, self._steps
        self._steps += 1
        return [
            JobReplicaRecord(
                step=step,
                epoch=now["epoch"],
                replica=replica,
                active=arms.is_on(now["epoch"], self._ab_every),
                **{name: now.get(name, 0) - then.get(name, 0) for name in _COUNTED},
                **{name: now.get(name, 0) for name in _STATE},
            )
            for replica, (now, then) in enumerate(zip(statistics, before, strict=True))
        ]


def scalars(records: Sequence[JobReplicaRecord]) -> dict[str, float]:
    """A step's figures, of all replicas together.

    Returns:
        Sums, and: `war/active`, 1 where WAR drafted and placed turns, 0 in an A/B arm without;
        `war/prefix_hit_rate`, the share of prompt tokens whose KV was there;
        `war/acceptance_length`, tokens per verified draft, the bonus token included;
        `war/makespan_seconds`, `busy_seconds` of the replica that was busy for longest, and
        `war/tokens_per_second`, output tokens of all by that time.
    """
    total = {name: sum(getattr(each, name) for each in records) for name in (*_COUNTED, *_STATE)}
    makespan = max((each.busy_seconds for each in records), default=0.0)
    rates = {
        "active": float(all(each.active for each in records)),
        "policy_epoch": max((each.epoch for each in records), default=0),
        "prefix_hit_rate": _share(total["cached_tokens"], total["prompt_tokens"]),
        "acceptance_rate": _share(total["accepted_tokens"], total["draft_tokens"]),
        "acceptance_length": _share(total["accepted_tokens"] + total["drafts"], total["drafts"]),
        "makespan_seconds": makespan,
        "tokens_per_second": _share(total["output_tokens"], makespan),
    }
    return {f"war/{name}": float(value) for name, value in (total | rates).items()}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
