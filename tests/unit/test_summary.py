import json
import math
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records_builder import (
    CACHED,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    REPLICAS,
    STEPS,
    TRAJECTORIES,
    TURNS,
    alternating_run,
    changed,
    fixed_work,
    full_run,
    live_run,
    one_pass,
    one_step,
    resumed_run,
)

from nemo_war.report.passes import MODES
from nemo_war.report.summary import summarize, to_json, write
from nemo_war.telemetry.records import (
    BeginRecord,
    CheckpointRecord,
    ExchangeRecord,
    JobReplicaRecord,
    OutageRecord,
    Pass,
    RefitRecord,
    ReliabilityRecord,
    ReplicaRecord,
    ResumeRecord,
    StepRecord,
    TurnRecord,
)

DOCS = Path(__file__).parents[2] / "docs" / "summary.md"
WAR, BASELINE = Pass("war", "fixed", 1), Pass("baseline", "fixed", 0)
TURNS_OF_A_PASS = STEPS * TRAJECTORIES * TURNS


def keys(value, path=""):
    """Dotted paths of a summary as docs/summary.md writes them."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from keys(entry, f"{path}.{'<mode>' if key in MODES else key}".lstrip("."))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from keys(value[0], f"{path}[]")
    else:
        yield path


def test_every_key_is_documented_and_every_documented_key_exists():
    documented = set(re.findall(r"^\|(.*?)\|", DOCS.read_text(), re.MULTILINE))
    documented = {key for cell in documented for key in re.findall(r"`([^`]+)`", cell)}
    same = {"live": "modes", "speedup_vs_sticky": "speedup"}
    produced = set()
    for key in [*keys(summarize(full_run())), *keys(summarize(resumed_run()))]:
        head, _, rest = key.partition(".")
        produced |= {head.removesuffix("[]"), f"{same.get(head, head)}.{rest}" if rest else head}
    intermediate = {"speedup.makespan", "speedup.output_tokens_per_s"}
    assert documented == produced | intermediate


def test_counts_are_those_of_one_pass_and_times_are_medians_over_repeats():
    war = summarize(fixed_work())["modes"]["war"]
    assert war["repeats"] == 3
    assert war["turns"] == TURNS_OF_A_PASS
    assert war["output_tokens"] == TURNS_OF_A_PASS * OUTPUT_TOKENS
    assert war["makespan_s"] == pytest.approx(STEPS * 6.0 * 1.01)
    assert war["output_tokens_per_s"] == pytest.approx(war["output_tokens"] / war["makespan_s"])
    assert war["refit_seconds"] == pytest.approx(STEPS * 0.5)


def test_prefill_is_what_the_cache_did_not_give():
    war = summarize(fixed_work())["modes"]["war"]
    assert war["cached_tokens"] == TURNS_OF_A_PASS * CACHED["war"]
    assert war["prefill_tokens"] == TURNS_OF_A_PASS * PROMPT_TOKENS - war["cached_tokens"]
    assert war["prefix_hit_rate"] == pytest.approx(CACHED["war"] / PROMPT_TOKENS)


def test_what_replicas_told_each_other_is_counted_for_one_pass():
    modes = summarize(changed(fixed_work(), WAR, ExchangeRecord, failed=6))["modes"]
    assert modes["war"]["exchanged_tokens"] == STEPS * 500
    assert modes["war"]["exchange_seconds"] == pytest.approx(STEPS * 0.25)
    assert (modes["war"]["exchange_failures"], modes["war"]["exchange_dropped"]) == (2, STEPS * 3)
    assert modes["baseline"]["exchanged_tokens"] == 0


def test_the_acceptance_length_includes_the_bonus_token():
    war = summarize(fixed_work())["modes"]["war"]
    assert war["acceptance_length"] == pytest.approx(1 + 75 / 50)
    assert war["draft_tokens"] == STEPS * REPLICAS * 120
    assert war["drafts_wasted"] == STEPS * REPLICAS * (120 - 75)
    assert war["share_of_steps_speculating"] == pytest.approx(0.4)


def test_without_drafts_there_is_no_acceptance_length():
    assert summarize(fixed_work())["modes"]["baseline"]["acceptance_length"] is None


def test_the_reward_is_a_mean_over_trajectories_and_not_over_steps():
    small, large = one_step(BASELINE, 0, 1.0), one_step(BASELINE, 1, 1.0)
    records = changed([*small, *large], BASELINE, StepRecord, 0, trajectories=1, reward_mean=1.0)
    assert summarize(records)["modes"]["baseline"]["reward_mean"] == pytest.approx((1 + 4 * 0.25) / 5)


def test_equal_work_gives_a_speed_up_with_an_interval():
    summary = summarize(fixed_work())
    speedup = summary["speedup"]["makespan"]
    assert summary["invariants"] == {
        "ok": True,
        "turns": TURNS_OF_A_PASS,
        "prompt_tokens": TURNS_OF_A_PASS * PROMPT_TOKENS,
        "output_tokens": TURNS_OF_A_PASS * OUTPUT_TOKENS,
        "truncations": 0,
        "errors": 0,
        "reasons": [],
    }
    assert speedup["ratio"] == pytest.approx(10 / 6.06)
    assert 10 / 6.12 - 1e-9 <= speedup["low"] < speedup["ratio"] < speedup["high"] <= 10 / 6 + 1e-9
    assert speedup["repeats"] == 3
    assert summary["speedup"]["output_tokens_per_s"]["ratio"] == pytest.approx(speedup["ratio"])
    assert summary["speedup_vs_sticky"]["makespan"]["ratio"] == pytest.approx(9 / 6.06)


def test_ratios_are_paired_by_repeat_so_that_a_slow_machine_cancels_out():
    records = [
        record
        for repeat, slowness in enumerate((1, 5, 2))
        for mode, seconds in (("baseline", 10.0), ("war", 5.0))
        for record in one_pass(Pass(mode, "fixed", repeat), seconds * slowness)
    ]
    speedup = summarize(records)["speedup"]["makespan"]
    assert (speedup["low"], speedup["ratio"], speedup["high"]) == pytest.approx((2, 2, 2))


def test_a_single_repeat_has_no_interval():
    speedup = summarize(fixed_work(repeats=1))["speedup"]["makespan"]
    assert (speedup["low"], speedup["high"], speedup["repeats"]) == (None, None, 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([(TurnRecord, {"output_tokens": 33}), (StepRecord, {"output_tokens": 257})], "output tokens: 769"),
        ([(TurnRecord, {"prompt_tokens": 99}), (StepRecord, {"prompt_tokens": 799})], "prompt tokens: 2,399"),
        ([(StepRecord, {"truncations": 1})], "truncations: 1 in war repeat 1, 0 in baseline repeat 0"),
        ([(StepRecord, {"errors": 2})], "errors: 2 in war repeat 1, 0 in baseline repeat 0"),
        ([(TurnRecord, {"error": "timeout"})], "turns differ although the totals agree: war repeat 1"),
        ([(StepRecord, {"turns": 9})], "incomplete log: war repeat 1"),
    ],
)  # fmt: skip
def test_unequal_work_strikes_the_speed_up_out_and_says_why(changes, reason):
    records = fixed_work()
    for kind, fields in changes:
        records = changed(records, WAR, kind, **fields)
    summary = summarize(records)
    assert summary["invariants"]["ok"] is False
    assert summary["invariants"]["reasons"][0].startswith(reason)
    for speedup in (summary["speedup"], summary["speedup_vs_sticky"]):
        assert speedup["makespan"] is None
        assert speedup["output_tokens_per_s"] is None
        assert speedup["reason"] == f"unequal work: {summary['invariants']['reasons'][0]}"


def test_tokens_moved_between_turns_are_unequal_work_although_the_sums_agree():
    longer = changed(fixed_work(), WAR, TurnRecord, 0, output_tokens=OUTPUT_TOKENS + 1)
    records = changed(longer, WAR, TurnRecord, 1, output_tokens=OUTPUT_TOKENS - 1)
    (reason,) = summarize(records)["invariants"]["reasons"]
    assert reason.startswith("turns differ although the totals agree: war repeat 1 has a turn 0 of step 0")


def test_a_count_the_passes_disagree_on_is_null_and_the_others_stay():
    summary = summarize(changed(fixed_work(), WAR, StepRecord, truncations=1))
    assert summary["invariants"]["truncations"] is None
    assert summary["invariants"]["turns"] == TURNS_OF_A_PASS


def test_one_error_in_three_repeats_does_not_round_to_none():
    summary = summarize(changed(fixed_work(), WAR, StepRecord, errors=1))
    assert summary["modes"]["war"]["errors"] == pytest.approx(1 / 3)


def test_a_mode_that_did_not_run_is_absent_and_gives_no_speed_up():
    summary = summarize(fixed_work(modes=("baseline", "sticky")))
    assert set(summary["modes"]) == {"baseline", "sticky"}
    assert summary["speedup"]["reason"] == "no repeat of the fixed work was finished by both baseline and war"


def test_a_live_run_gives_figures_and_no_speed_up():
    summary = summarize(live_run())
    assert summary["modes"] == {}
    assert summary["live"]["war"]["output_tokens_per_s"] > summary["live"]["baseline"]["output_tokens_per_s"]
    assert summary["invariants"]["ok"] is None
    assert "--compare" in summary["speedup"]["reason"]


def test_validation_rollouts_are_nobodys_work():
    validation = one_pass(Pass("war", "validation"), 50.0)
    assert summarize([*fixed_work(), *validation]) == summarize(fixed_work())


def test_the_log_of_a_nemo_rl_job_has_no_passes_to_report_on():
    summary = summarize([JobReplicaRecord(0, 1, 0, True, turns=3)])
    assert (summary["modes"], summary["live"], summary["notes"]) == ({}, {}, [])


def test_an_interrupted_repeat_is_set_aside_and_said():
    records = [*fixed_work(repeats=2), *one_pass(Pass("baseline", "fixed", 2), 10.0), *one_pass(
        Pass("war", "fixed", 2), 99.0, steps=1
    )]  # fmt: skip
    summary = summarize(records)
    assert summary["speedup"] == summarize(fixed_work(repeats=2))["speedup"]
    assert summary["modes"] == summarize(fixed_work(repeats=2))["modes"]
    assert [note.split(":")[0] for note in summary["notes"]] == [
        "baseline repeat 2 is set aside",
        "war repeat 2 is set aside",
    ]


def test_turns_of_a_step_that_never_ended_are_left_out_and_said():
    unfinished = [
        record for record in one_step(Pass("war", "live"), STEPS, 6.0) if isinstance(record, TurnRecord)
    ]
    summary = summarize([*live_run(), *unfinished])
    assert summary["live"] == summarize(live_run())["live"]
    assert summary["notes"] == ["war live: 8 turns of a step that did not finish are left out"]


def test_steps_that_are_not_on_record_are_counted_and_said():
    live = Pass("war", "live")
    assert summarize([BeginRecord(live, STEPS), *live_run()])["notes"] == []
    said = "steps are not on record: the run has not done them, or the disk was full"
    assert summarize([BeginRecord(live, STEPS + 2), *live_run()])["notes"] == [
        f"war live: 2 of {STEPS + 2} {said}"
    ]
    resumed = ResumeRecord(live, STEPS, 9, "abc", "c/step_3")
    assert summarize([BeginRecord(live, STEPS + 2), resumed])["notes"] == [f"war live: 2 of 2 {said}"]


def test_checkpoints_that_could_not_be_written_are_counted_and_said():
    live = Pass("war", "live")
    saved, full = CheckpointRecord(live, 1, 0.1), CheckpointRecord(live, 2, 0.1, "step_2: no room")
    assert summarize([*live_run(), saved])["notes"] == []
    assert summarize([*live_run(), saved, full])["notes"] == [
        "war live: 1 of 2 checkpoints could not be written, the newest of this run is step_1; "
        "the last reason: step_2: no room"
    ]
    assert "this run saved none" in summarize([*live_run(), full])["notes"][0]


def test_turns_that_were_placed_without_the_scheduler_are_counted_and_said():
    assert summarize(live_run())["live"]["war"]["fallbacks"] is None, "it was not shared"
    live = Pass("war", "live")
    quiet = [OutageRecord(live, step) for step in range(STEPS)]
    summary = summarize([*live_run(), *quiet])
    assert (summary["live"]["war"]["fallbacks"], summary["notes"]) == (0, [])
    away = OutageRecord(live, 1, fallbacks=12, outages=2, seconds_out=3.21, reason="it died")
    summary = summarize([*live_run(), *quiet, away])
    assert summary["live"]["war"]["fallbacks"] == 12
    assert summary["live"]["baseline"]["fallbacks"] is None
    assert summary["notes"] == [
        "war live: 12 turns were placed by consistent hashing, as the scheduler did not answer; "
        "outages: 2, 3.2 s in all, the last reason: it died"
    ]


def test_refits_say_whether_every_replica_reset_its_cache():
    refits = summarize(changed(fixed_work(), WAR, RefitRecord, 2, kv_reset_ok=False))["refits"]
    assert len(refits) == 3 * 3 * STEPS
    assert [(r["mode"], r["repeat"], r["epoch"], r["replicas"]) for r in refits if not r["kv_reset_ok"]] == [
        ("war", 1, 3, REPLICAS)
    ]


def test_the_reliability_curve_is_that_of_all_replicas_at_the_last_step():
    (point,) = summarize(full_run())["reliability"]
    assert point == {
        "predicted": pytest.approx(0.85), "observed": pytest.approx(0.8), "draft_tokens": 2 * 400,
    }  # fmt: skip
    live = Pass("war", "live")
    other = [ReliabilityRecord(live, 3, 0, predicted=0.87, observed=0.4, draft_tokens=800)]
    other += [ReliabilityRecord(live, 3, 1, predicted=0.15, observed=0.1, draft_tokens=50)]
    low, high = summarize([*full_run(), *other])["reliability"]
    assert low == {"predicted": 0.15, "observed": 0.1, "draft_tokens": 50}
    assert high == {"predicted": pytest.approx(0.86), "observed": pytest.approx(0.6), "draft_tokens": 1600}
    assert summarize(fixed_work(modes=("baseline",)))["reliability"] == []


def test_the_history_is_that_of_the_fullest_replica_at_the_end_of_the_live_run():
    assert summarize(full_run())["history"] == {"tokens": 4_001, "epochs": 4}
    assert summarize(fixed_work())["history"] == {"tokens": 3_001, "epochs": 3}
    assert summarize(fixed_work(modes=("baseline",)))["history"] is None


def test_alternating_steps_are_reported_side_by_side_without_a_ratio():
    ab = summarize(alternating_run())["ab"]
    assert (ab["on"]["steps"], ab["off"]["steps"]) == (2, 2)
    assert ab["on"]["output_tokens_per_s"] == pytest.approx(2 * 8 * OUTPUT_TOKENS / 12)
    assert ab["off"]["output_tokens_per_s"] == pytest.approx(2 * 8 * OUTPUT_TOKENS / 20)
    assert summarize(live_run())["ab"] is None


def test_an_empty_log_gives_an_empty_summary():
    summary = summarize([], ["the header is missing"])
    assert (summary["modes"], summary["live"], summary["refits"], summary["history"]) == ({}, {}, [], None)
    assert summary["damage"] == ["the header is missing"]


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_cannot_be_true_gives_no_rate_and_no_speed_up(seconds):
    records = fixed_work(seconds={"baseline": seconds, "sticky": 9.0, "war": 6.0})
    summary = summarize(records)
    assert summary["modes"]["baseline"]["output_tokens_per_s"] is None
    assert summary["speedup"]["makespan"] is None
    json.loads(to_json(summary), parse_constant=pytest.fail)


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_order_of_records_between_passes_does_not_matter(draw: random.Random):
    records = full_run()
    runs = list({record.run: None for record in records})
    draw.shuffle(runs)
    by_run = [record for run in runs for record in records if record.run == run]
    assert summarize(by_run) == summarize(records)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_part_of_a_log_can_be_summarized(data):
    records = full_run()
    kept = data.draw(st.lists(st.sampled_from(records), max_size=40))
    to_json(summarize(kept))


def test_the_file_is_replaced_whole_and_only_its_owner_reads_it(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text("old")
    summary = summarize(full_run())
    write(path, summary)
    assert json.loads(path.read_text()) == summary
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_summary_that_cannot_be_written_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="JSON"):
        write(path, {"speed": math.nan})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_drafting_that_failed_is_counted():
    records = changed(fixed_work(), WAR, ReplicaRecord, errors=3)
    assert summarize(records)["modes"]["war"]["draft_errors"] == 1


def test_a_resumed_run_says_where_it_went_on_and_counts_its_own_steps():
    summary = summarize(resumed_run(4))
    assert summary["resumed"] == {
        "steps_before": 4,
        "epoch": 5,
        "weights_digest": "0123abcd",
        "checkpoint": "/results/grpo/step_4",
    }
    assert summary["live"]["war"]["steps"] == 1
    assert summarize(full_run())["resumed"] is None
