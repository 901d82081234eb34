"""Synthetic runs, small and exact, for the tests of the log and the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_war.telemetry.records import (
    ExchangeRecord,
    Pass,
    Record,
    RefitRecord,
    ReliabilityRecord,
    ReplicaRecord,
    ResumeRecord,
    StepRecord,
    TurnRecord,
)

STEPS = 3
REPLICAS = 2
TRAJECTORIES = 4
TURNS = 2
PROMPT_TOKENS, OUTPUT_TOKENS = 100, 32
"""Of each turn."""

SECONDS = {"baseline": 10.0, "sticky": 9.0, "war": 6.0}
"""Makespan of one step."""
CACHED = {"baseline": 20, "sticky": 60, "war": 60}
"""Prompt tokens from cache, of each turn."""
DRAFTING: dict[str, Any] = {
    "speculating_steps": 40, "drafts": 50, "draft_tokens": 120, "accepted_tokens": 75, "draft_seconds": 0.02,
}  # fmt: skip
"""Of each WAR replica in each step, whose 100 engine steps sample something."""


def one_step(run: Pass, step: int, seconds: float, *, war_active: bool = True) -> list[Record]:
    """All records of one step: its turns, its replicas, itself, its refit. Drafts only with WAR."""
    turns: list[Record] = [
        TurnRecord(
            run=run,
            step=step,
            epoch=step,
            trajectory=f"s{step}-t{t}",
            group=f"s{step}",
            turn=turn,
            replica=t % REPLICAS,
            start_s=0.0,
            first_token_s=0.1,
            end_s=seconds,
            prompt_tokens=PROMPT_TOKENS,
            cached_tokens=CACHED[run.mode],
            output_tokens=OUTPUT_TOKENS,
            finish_reason="length",
        )
        for t in range(TRAJECTORIES)
        for turn in range(TURNS)
    ]
    count = len(turns)
    replicas = [
        ReplicaRecord(
            run,
            step,
            replica,
            engine_steps=100,
            history_tokens=1_000 * (step + 1) + replica,
            history_epochs=step + 1,
            **(DRAFTING if run.mode == "war" else {}),
        )
        for replica in range(REPLICAS)
    ]
    curves: list[Record] = [
        ReliabilityRecord(run, step, replica, predicted=0.85, observed=0.8, draft_tokens=100 * (step + 1))
        for replica in range(REPLICAS if run.mode == "war" else 0)
    ]
    ended = StepRecord(
        run,
        step,
        epoch=step,
        rollout_s=seconds,
        train_s=1.0,
        refit_s=0.5,
        trajectories=TRAJECTORIES,
        turns=count,
        prompt_tokens=count * PROMPT_TOKENS,
        output_tokens=count * OUTPUT_TOKENS,
        truncations=0,
        errors=0,
        reward_mean=0.25,
        war_active=war_active,
    )
    refit = RefitRecord(
        run, step + 1, REPLICAS, kv_reset_ok=True, seconds=0.5, transfer_bytes=1 << 20, in_flight=0
    )
    told: list[Record] = [
        ExchangeRecord(run, step, "step", batches=2, tokens=500, seconds=0.25, dropped=3)
        for _ in range(run.mode == "war")
    ]
    return [*turns, *replicas, *curves, *told, ended, refit]


def one_pass(run: Pass, seconds: float, steps: int = STEPS) -> list[Record]:
    return [record for step in range(steps) for record in one_step(run, step, seconds)]


def fixed_work(
    modes: Sequence[str] = ("baseline", "sticky", "war"),
    repeats: int = 3,
    seconds: Mapping[str, float] = SECONDS,
) -> list[Record]:
    """Equal work in every mode and repeat; each repeat is one percent slower than the last in WAR only."""
    return [
        record
        for repeat in range(repeats)
        for mode in modes
        for record in one_pass(
            Pass(mode, "fixed", repeat), seconds[mode] * (1 + repeat / 100 if mode == "war" else 1)
        )
    ]


def live_run(modes: Sequence[str] = ("baseline", "sticky", "war")) -> list[Record]:
    return [record for mode in modes for record in one_pass(Pass(mode, "live"), SECONDS[mode])]


def alternating_run() -> list[Record]:
    """A live WAR run in which every other step has WAR switched off."""
    run = Pass("war", "live")
    return [
        record
        for step in range(4)
        for record in one_step(run, step, 6.0 if step % 2 == 0 else 10.0, war_active=step % 2 == 0)
    ]


def resumed_run(done: int = 4) -> list[Record]:
    """A live WAR run of one more step than an earlier process did."""
    run = Pass("war", "live")
    resume = ResumeRecord(run, done, done + 1, "0123abcd", f"/results/grpo/step_{done}")
    return [resume, *one_step(run, done, 6.0)]


def full_run() -> list[Record]:
    """A run with everything a summary can tell about, but that it was resumed: no comparison is."""
    return [*live_run(("baseline", "sticky")), *alternating_run(), *fixed_work()]


def changed(
    records: Iterable[Record], run: Pass, kind: type[Record], nth: int = 0, **fields: Any
) -> list[Record]:
    """The records with fields of one of them (the nth of its kind in a pass) replaced."""
    result = list(records)
    places = [i for i, record in enumerate(result) if record.run == run and type(record) is kind]
    result[places[nth]] = replace(result[places[nth]], **fields)
    return result
