"""From raw records to the figures of `summary.json`: pure, every key explained in docs/summary.md.

The unit is a *pass*: the records of one mode over one piece of work. Times are
medians over the repeats of the fixed work, counts are means per pass, and a
speed-up is taken only from repeats that did equal work. Equal is exact: the fixed
work is recorded, so a single token more means that something else was measured.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_war.report.passes import PassRecords, by_pass
from nemo_war.telemetry.records import (
    OutageRecord,
    Record,
    RefitRecord,
    ReliabilityRecord,
    ReplicaRecord,
    ResumeRecord,
    StepRecord,
)

SCHEMA = 1
BOOTSTRAP_SAMPLES = 2_000
"""Enough for steady 2.5 % and 97.5 % points; a run has a handful of repeats, so this takes milliseconds."""
BOOTSTRAP_SEED = 0
"""Fixed, so that the same log always gives the same report."""

Json = dict[str, Any]


def summarize(records: Iterable[Record], damage: Sequence[str] = ()) -> Json:
    """Everything `summary.json` holds.

    Args:
        records: the records of one run, in the order they were written.
        damage: what the reader of the log could not read, passed through.
    """
    passes, notes = _finished(by_pass(records))
    fixed, set_aside = _complete_repeats([p for p in passes if p.run.phase == "fixed"])
    live = [p for p in passes if p.run.phase == "live"]
    invariants = _invariants(fixed)
    summary = {
        "schema": SCHEMA,
        "modes": _modes(fixed),
        "live": _modes(live),
        "speedup": _speedup(fixed, "baseline", invariants),
        "speedup_vs_sticky": _speedup(fixed, "sticky", invariants),
        "invariants": invariants,
        "refits": [_refit(refit) for p in passes for refit in p.refits],
        "history": _history(passes),
        "reliability": _reliability(passes),
        "ab": _alternation(live),
        "resumed": next((_resumed(resume) for p in live for resume in p.resumes), None),
        "notes": [
            *notes,
            *set_aside,
            *filter(None, map(_without_steps, passes)),
            *filter(None, map(_without_checkpoints, passes)),
            *filter(None, map(_without_scheduler, passes)),
        ],
        "damage": list(damage),
    }
    return {key: _finite(value) for key, value in summary.items()}


def to_json(summary: Mapping[str, Any]) -> str:
    """The text of `summary.json`: strict JSON, since `NaN` breaks most readers."""
    return json.dumps(summary, indent=2, allow_nan=False) + "\n"


def write(path: Path, summary: Mapping[str, Any]) -> None:
    """Put the summary at `path` whole or not at all, replacing an older one."""
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(to_json(summary))
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise


# --- which records belong together -------------------------------------------------------


def _finished(passes: Sequence[PassRecords]) -> tuple[list[PassRecords], list[str]]:
    """Drop the turns of steps that never ended: their time is in no makespan. Returns notes on them."""
    kept, notes = [], []
    for p in passes:
        ended = {step.step for step in p.steps}
        turns = tuple(turn for turn in p.turns if turn.step in ended)
        replicas = tuple(replica for replica in p.replicas if replica.step in ended)
        exchanges = tuple(exchange for exchange in p.exchanges if exchange.step in ended)
        kept.append(replace(p, turns=turns, replicas=replicas, exchanges=exchanges))
        if left := len(p.turns) - len(turns):
            notes.append(f"{p.name}: {left} turns of a step that did not finish are left out")
    return kept, notes


def _complete_repeats(fixed: Sequence[PassRecords]) -> tuple[list[PassRecords], list[str]]:
    """Keep the repeats that every mode finished; an interrupted run ends in the middle of one.

    When no repeat is complete, the complete passes are kept, to show what can be shown.
    """
    every_step = {step.step for p in fixed for step in p.steps}
    complete = [p for p in fixed if every_step and {step.step for step in p.steps} == every_step]
    modes = {p.run.mode for p in fixed}
    shared = [p for p in complete if {q.run.mode for q in complete if q.run.repeat == p.run.repeat} == modes]
    kept = shared or complete
    runs = {p.run for p in kept}
    return kept, [
        f"{p.name} is set aside: it has {len(p.steps)} of {len(every_step)} steps, "
        "and a repeat counts only when every mode finished it"
        for p in fixed
        if p.run not in runs
    ]


def _without_steps(p: PassRecords) -> str | None:
    """A run that was stopped, or one that could not write all that it did, has less than it was to have."""
    if not p.begins:
        return None
    done = p.resumes[0].step if p.resumes else 0
    wanted = set(range(done, p.begins[0].steps))
    missing = wanted - {step.step for step in p.steps}
    if not missing:
        return None
    return (
        f"{p.name}: {len(missing)} of {len(wanted)} steps are not on record: "
        "the run has not done them, or the disk was full"
    )


def _without_checkpoints(p: PassRecords) -> str | None:
    """Where the disk was full, steps would be done again by a run that goes on from there."""
    failed = [each for each in p.checkpoints if each.error]
    if not failed:
        return None
    saved = [each.step for each in p.checkpoints if not each.error]
    newest = f"the newest of this run is step_{max(saved)}" if saved else "this run saved none"
    return (
        f"{p.name}: {len(failed)} of {len(p.checkpoints)} checkpoints could not be written, {newest}; "
        f"the last reason: {failed[-1].error}"
    )


def _without_scheduler(p: PassRecords) -> str | None:
    """A shared scheduler that does not answer costs speed, which the figures of this pass then show."""
    lost = [each for each in p.outages if each.fallbacks or each.outages]
    if not lost:
        return None
    fallbacks, outages = sum(each.fallbacks for each in lost), sum(each.outages for each in lost)
    seconds = sum(each.seconds_out for each in lost)
    return (
        f"{p.name}: {fallbacks:,} turns were placed by consistent hashing, as the scheduler did not answer; "
        f"outages: {outages}, {seconds:.1f} s in all, the last reason: {lost[-1].reason}"
    )


# --- figures of one mode -----------------------------------------------------------------


def _modes(passes: Sequence[PassRecords]) -> Json:
    by_mode: dict[str, list[PassRecords]] = defaultdict(list)
    for p in passes:
        if p.steps:
            by_mode[p.run.mode].append(p)
    return {mode: _mode(group) for mode, group in by_mode.items()}


def _mode(passes: Sequence[PassRecords]) -> Json:
    """The figures of one mode over its repeats."""
    steps = [step for p in passes for step in p.steps]
    turns = [turn for p in passes for turn in p.turns]
    prompt = sum(turn.prompt_tokens for turn in turns)
    cached = sum(turn.cached_tokens for turn in turns)
    rates = [rate for p in passes if (rate := _rate(p.output_tokens, p.makespan_s)) is not None]
    trajectories = sum(step.trajectories for step in steps)
    count = len(passes)
    return {
        "repeats": count,
        "steps": _per_pass(len(steps), count),
        "turns": _per_pass(len(turns), count),
        "prompt_tokens": _per_pass(prompt, count),
        "output_tokens": _per_pass(sum(turn.output_tokens for turn in turns), count),
        "makespan_s": statistics.median(p.makespan_s for p in passes),
        "output_tokens_per_s": statistics.median(rates) if rates else None,
        "prefill_tokens": _per_pass(prompt - cached, count),
        "cached_tokens": _per_pass(cached, count),
        "prefix_hit_rate": _ratio(cached, prompt),
        **_drafting([replica for p in passes for replica in p.replicas], count),
        "reward_mean": _ratio(sum(step.reward_mean * step.trajectories for step in steps), trajectories),
        "truncations": _per_pass(sum(p.truncations for p in passes), count),
        "errors": _per_pass(sum(p.errors for p in passes), count),
        "fallbacks": _fallbacks([outage for p in passes for outage in p.outages], count),
        "refit_seconds": statistics.median(sum(refit.seconds for refit in p.refits) for p in passes),
        **_sharing(passes),
    }


def _drafting(replicas: Sequence[ReplicaRecord], passes: int) -> Json:
    """What speculation did. Without a single draft there is no acceptance length, not one of 1."""
    drafts = sum(r.drafts for r in replicas)
    drafted = sum(r.draft_tokens for r in replicas)
    accepted = sum(r.accepted_tokens for r in replicas)
    return {
        "acceptance_length": 1 + accepted / drafts if drafts > 0 else None,
        "draft_tokens": _per_pass(drafted, passes),
        "drafts_wasted": _per_pass(drafted - accepted, passes),
        "draft_seconds": sum(r.draft_seconds for r in replicas) / passes,
        "draft_errors": _per_pass(sum(r.errors for r in replicas), passes),
        "share_of_steps_speculating": _ratio(
            sum(r.speculating_steps for r in replicas), sum(r.engine_steps for r in replicas)
        ),
    }


def _sharing(passes: Sequence[PassRecords]) -> Json:
    """What replicas told each other of their histories."""
    exchanges = [exchange for p in passes for exchange in p.exchanges]
    return {
        "exchanged_tokens": _per_pass(sum(e.tokens for e in exchanges), len(passes)),
        "exchange_seconds": statistics.median(sum(e.seconds for e in p.exchanges) for p in passes),
        "exchange_failures": _per_pass(sum(e.failed for e in exchanges), len(passes)),
        "exchange_dropped": _per_pass(sum(e.dropped for e in exchanges), len(passes)),
    }


def _fallbacks(outages: Sequence[OutageRecord], passes: int) -> float | None:
    return _per_pass(sum(each.fallbacks for each in outages), passes) if outages else None


def _per_pass(total: int, passes: int) -> float:
    """Mean: a whole number stays one, and one error in three passes does not become none."""
    return total // passes if total % passes == 0 else total / passes


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _rate(tokens: int, seconds: float) -> float | None:
    """Tokens per second, or None when either cannot be true (a damaged log)."""
    return tokens / seconds if tokens > 0 and seconds > 0 and math.isfinite(seconds) else None


# --- equal work, and the speed-up it allows ----------------------------------------------

_INVARIANTS: dict[str, Callable[[PassRecords], int]] = {
    "turns": lambda p: len(p.turns),
    "prompt_tokens": lambda p: p.prompt_tokens,
    "output_tokens": lambda p: p.output_tokens,
    "truncations": lambda p: p.truncations,
    "errors": lambda p: p.errors,
}


def _invariants(fixed: Sequence[PassRecords]) -> Json:
    """Whether all passes over the fixed work did the same work, and if not, where they differ."""
    if not fixed:
        return {"ok": None, **dict.fromkeys(_INVARIANTS), "reasons": []}
    reference, reasons = fixed[0], [reason for p in fixed if (reason := _lost_turns(p))]
    agreed: dict[str, int | None] = {}
    for name, measure in _INVARIANTS.items():
        expected = measure(reference)
        others = [p for p in fixed if measure(p) != expected]
        agreed[name] = None if others else expected
        if others:
            reasons.append(
                f"{name.replace('_', ' ')}: {measure(others[0]):,} in {others[0].name}{_and_more(others)}, "
                f"{expected:,} in {reference.name}"
            )
    if not reasons:
        reasons = _unlike_turns(reference, fixed)
    return {"ok": not reasons, **agreed, "reasons": reasons}


def _and_more(passes: Sequence[PassRecords]) -> str:
    return f" (and unequal in {len(passes) - 1} more)" if len(passes) > 1 else ""


def _lost_turns(p: PassRecords) -> str | None:
    """A step counts its own work, so a log that lost turn records shows."""
    counted = (
        sum(step.turns for step in p.steps),
        sum(step.prompt_tokens for step in p.steps),
        sum(step.output_tokens for step in p.steps),
    )
    logged = (len(p.turns), p.prompt_tokens, p.output_tokens)
    if counted == logged:
        return None
    (turns, prompt, output), (found, found_prompt, found_output) = counted, logged
    return (
        f"incomplete log: {p.name} has {found:,} turns, {found_prompt:,} prompt, {found_output:,} output "
        f"tokens, its steps count {turns:,}, {prompt:,}, {output:,}"
    )


def _unlike_turns(reference: PassRecords, fixed: Sequence[PassRecords]) -> list[str]:
    """The totals agree: compare turn by turn. Trajectory names are left out, a mode may name its own."""
    expected = _turn_shapes(reference)
    unlike = [p for p in fixed if _turn_shapes(p) != expected]
    if not unlike:
        return []
    step, turn, prompt, output, _ = min(_turn_shapes(unlike[0]) - expected)
    return [
        f"turns differ although the totals agree: {unlike[0].name}{_and_more(unlike)} has a turn {turn} of "
        f"step {step} with {prompt:,} prompt and {output:,} output tokens, {reference.name} has none such"
    ]


def _turn_shapes(p: PassRecords) -> Counter[tuple[int, int, int, int, bool]]:
    return Counter((t.step, t.turn, t.prompt_tokens, t.output_tokens, t.error is not None) for t in p.turns)


def _speedup(fixed: Sequence[PassRecords], reference: str, invariants: Json) -> Json:
    """How many times faster WAR was than `reference`; above 1 WAR is faster, in both figures."""
    if not fixed:
        return _no_speedup("no fixed work was run; use nemo-war run CONFIG --compare")
    war, other = ({p.run.repeat: p for p in fixed if p.run.mode == mode} for mode in ("war", reference))
    pairs = [(war[repeat], other[repeat]) for repeat in sorted(war.keys() & other.keys())]
    if not pairs:
        return _no_speedup(f"no repeat of the fixed work was finished by both {reference} and war")
    if not invariants["ok"]:
        return _no_speedup(f"unequal work: {invariants['reasons'][0]}")
    rates = [(_rate(p.output_tokens, p.makespan_s), _rate(q.output_tokens, q.makespan_s)) for p, q in pairs]
    if any(mine is None or theirs is None for mine, theirs in rates):
        return _no_speedup("a pass has no output tokens or no time, so it has no rate")
    return {
        "output_tokens_per_s": _interval([mine / theirs for mine, theirs in rates if mine and theirs]),
        "makespan": _interval([q.makespan_s / p.makespan_s for p, q in pairs]),
        "reason": None,
    }


def _no_speedup(reason: str) -> Json:
    return {"output_tokens_per_s": None, "makespan": None, "reason": reason}


def _interval(ratios: Sequence[float]) -> Json:
    """Median of the paired ratios and its 95 % bootstrap interval over repeats."""
    low = high = None
    if len(ratios) > 1:
        draw = random.Random(BOOTSTRAP_SEED)
        medians = [statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(BOOTSTRAP_SAMPLES)]
        cuts = statistics.quantiles(medians, n=40, method="inclusive")
        low, high = cuts[0], cuts[-1]
    return {"ratio": statistics.median(ratios), "low": low, "high": high, "repeats": len(ratios)}


# --- the rest ----------------------------------------------------------------------------


def _refit(refit: RefitRecord) -> Json:
    return {
        "mode": refit.run.mode,
        "phase": refit.run.phase,
        "repeat": refit.run.repeat,
        "epoch": refit.epoch,
        "replicas": refit.replicas,
        "kv_reset_ok": refit.kv_reset_ok,
        "seconds": refit.seconds,
    }


def _resumed(resume: ResumeRecord) -> Json:
    return {
        "steps_before": resume.step,
        "epoch": resume.epoch,
        "weights_digest": resume.weights_digest,
        "checkpoint": resume.checkpoint,
    }


def _history(passes: Sequence[PassRecords]) -> Json | None:
    """The fullest replica at the end of WAR's live run, or of its last fixed pass; None without WAR."""
    chosen = _last_of_war(passes)
    if chosen is None:
        return None
    # Replicas may hold copies of the same tokens, so their histories do not add up.
    last = {record.replica: record for record in chosen.replicas}.values()
    return {"tokens": max(r.history_tokens for r in last), "epochs": max(r.history_epochs for r in last)}


def _reliability(passes: Sequence[PassRecords]) -> list[Json]:
    """Points of the drafters' reliability curve at the same end, all replicas together."""
    chosen = _last_of_war(passes)
    records = chosen.reliability if chosen else ()
    end = max((record.step for record in records), default=0)
    deciles: dict[int, list[ReliabilityRecord]] = defaultdict(list)
    for record in records:
        if record.step == end:
            deciles[min(int(record.predicted * 10), 9)].append(record)
    points = []
    for _, group in sorted(deciles.items()):
        tokens = sum(r.draft_tokens for r in group)
        points.append(
            {
                "predicted": _ratio(sum(r.predicted * r.draft_tokens for r in group), tokens),
                "observed": _ratio(sum(r.observed * r.draft_tokens for r in group), tokens),
                "draft_tokens": tokens,
            }
        )
    return points


def _last_of_war(passes: Sequence[PassRecords]) -> PassRecords | None:
    """WAR's live run, or its last fixed pass."""
    groups = [p for p in passes if p.run.mode == "war" and p.replicas]
    return max(groups, key=lambda p: (p.run.phase == "live", p.run.repeat), default=None)


def _alternation(live: Sequence[PassRecords]) -> Json | None:
    """WAR on against off within one live run, when its steps alternate. Different text: no ratio."""
    steps = [(p, step) for p in live if p.run.mode == "war" for step in p.steps]
    on = [(p, step) for p, step in steps if step.war_active]
    off = [(p, step) for p, step in steps if not step.war_active]
    return {"on": _side(on), "off": _side(off)} if on and off else None


def _side(steps: Sequence[tuple[PassRecords, StepRecord]]) -> Json:
    tokens = sum(turn.output_tokens for p, step in steps for turn in p.turns if turn.step == step.step)
    seconds = sum(step.rollout_s for _, step in steps)
    return {
        "steps": len(steps),
        "output_tokens": tokens,
        "makespan_s": seconds,
        "output_tokens_per_s": _rate(tokens, seconds),
    }


def _finite(value: Any) -> Any:
    """Replace NaN and infinities by null, at any depth: JSON has no word for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return value
