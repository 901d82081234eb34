import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from records_builder import changed, fixed_work, full_run, live_run, resumed_run
from rich.console import Console

from nemo_war.errors import UserError
from nemo_war.report.main import report
from nemo_war.report.summary import summarize
from nemo_war.report.table import WIDTH, print_report
from nemo_war.telemetry.log import EventLog
from nemo_war.telemetry.records import ExchangeRecord, Pass, RefitRecord, ReplicaRecord, StepRecord

RUN = Path("runs/latest")


def rendered(records, damage=(), **console) -> str:
    out = io.StringIO()
    print_report(summarize(records, damage), RUN, Console(file=out, width=WIDTH, **console))
    return out.getvalue()


def sentence(records) -> str:
    """The report as one line, since a sentence may be folded anywhere."""
    return " ".join(rendered(records).split())


@pytest.fixture
def run_folder(tmp_path):
    with EventLog(tmp_path / "run" / "events.jsonl") as log:
        for record in full_run():
            log.append(record)
    return tmp_path / "run"


def test_the_report_of_a_full_run_fits_one_screen():
    lines = rendered(full_run()).splitlines()
    assert len(lines) <= 45
    assert max(len(line) for line in lines) <= WIDTH


def test_a_narrow_terminal_cuts_no_column_off():
    out = io.StringIO()
    print_report(summarize(full_run()), RUN, Console(file=out, width=66))
    assert "42.2" in out.getvalue()
    assert "270 (38 %)" in out.getvalue()


def test_a_damaged_and_slower_run_still_fits_one_screen():
    records = changed(full_run(), Pass("war", "fixed", 1), RefitRecord, kv_reset_ok=False)
    records = changed(records, Pass("war", "fixed", 1), ReplicaRecord, errors=5)
    assert len(rendered(records, damage=["line 3: not JSON"] * 2).splitlines()) <= 45


def test_history_that_did_not_reach_every_replica_is_said():
    records = changed(full_run(), Pass("war", "fixed", 1), ExchangeRecord, failed=3)
    assert "History was not told to every replica 1 times a pass; it came again later" in sentence(records)
    assert "History was not told" not in sentence(full_run())


def test_it_is_plain_text_without_a_terminal_and_coloured_on_one():
    assert rendered(full_run()).isascii()
    assert "\x1b[" not in rendered(full_run())
    assert "\x1b[" in rendered(full_run(), force_terminal=True, color_system="standard")


def test_a_faster_war_is_said_with_its_interval():
    text = sentence(fixed_work())
    assert "Yes. WAR was 1.65 times as fast as the baseline (interval 1.63 to 1.67, 3 repeats)." in text
    assert "WAR was 1.49 times as fast as sticky routing alone" in text
    assert "read an interval as a range" in text
    assert "Yes, to the token. Every pass: 24 turns, 2,400 prompt and 768 output tokens" in text


def test_a_slower_war_is_said_plainly():
    text = sentence(fixed_work(seconds={"baseline": 5.0, "sticky": 7.0, "war": 6.0}))
    assert "No. WAR was SLOWER than the baseline: 0.83 times its speed" in text
    assert "Yes. WAR was 1.16 times as fast as sticky routing alone" in text


def test_a_difference_within_the_interval_is_not_called_one():
    text = sentence(fixed_work(seconds={"baseline": 6.05, "sticky": 6.05, "war": 6.0}))
    assert (
        "Not proven. WAR was SLOWER than the baseline: 1.00 times its speed, but that may be chance" in text
    )


def test_one_repeat_proves_nothing():
    text = sentence(fixed_work(repeats=1))
    assert "Not proven. WAR was 1.67 times as fast as the baseline, but in one repeat only" in text


def test_unequal_work_shows_no_ratio_and_names_the_difference():
    text = sentence(changed(fixed_work(), Pass("war", "fixed", 1), StepRecord, truncations=1))
    assert "NOT EQUAL work" in text
    assert "Speed-up struck out" in text
    assert "truncations: 1 in war repeat 1, 0 in baseline repeat 0" in text
    assert "times as fast" not in text


def test_a_live_run_gives_no_speed_up_and_says_how_to_get_one():
    text = sentence(live_run())
    assert "no speed-up follows from it" in text
    assert "Not measured: no fixed work was run; use nemo-war run CONFIG --compare." in text


def test_a_cache_reset_that_was_not_confirmed_stands_out():
    assert "reset confirmed by every replica: yes" in sentence(fixed_work())
    text = sentence(changed(fixed_work(), Pass("war", "fixed", 1), RefitRecord, kv_reset_ok=False))
    assert "reset confirmed by every replica: NO, not in 1 (first: war fixed, epoch 1)" in text


def test_without_drafts_the_acceptance_length_is_a_dash():
    records = [
        type(record)(record.run, record.step, record.replica) if isinstance(record, ReplicaRecord) else record
        for record in fixed_work()
    ]
    text = rendered(records)
    assert next(line for line in text.splitlines() if "acceptance length" in line).split() == [
        "acceptance", "length", "-", "-", "-",
    ]  # fmt: skip
    assert "Drafts: none." in text


def test_a_log_without_a_finished_step_says_so():
    text = rendered([], damage=["line 1: not JSON"])
    assert "no finished step" in text
    assert "line 1: not JSON" in text


def test_a_name_from_a_damaged_file_cannot_drive_the_terminal():
    strange = [replace(r, run=Pass("\x1b[2J[red]", "fixed")) for r in fixed_work(modes=("war",))]
    text = rendered(strange)
    assert "\x1b" not in text
    assert "?[2J[red]" in text


def test_the_command_prints_the_table_of_a_folder_a_link_or_a_log(run_folder, capsys):
    latest = run_folder.parent / "latest"
    latest.symlink_to("run")
    for place in (run_folder, latest, run_folder / "events.jsonl"):
        assert report(place, as_json=False) == 0
        assert "Did it help?" in capsys.readouterr().out


def test_the_command_prints_json_and_nothing_else(run_folder, capsys):
    assert report(run_folder, as_json=True) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == summarize(full_run())
    assert captured.err == ""


def test_damaged_parts_are_listed_under_the_table(run_folder, capsys):
    with (run_folder / "events.jsonl").open("ab") as file:
        file.write(b'{"kind": "StepRec')
    assert report(run_folder, as_json=False) == 0
    assert capsys.readouterr().out.rstrip().endswith("cut off: the run was stopped while writing it")


def test_a_log_with_nothing_to_show_is_a_failure(tmp_path, capsys):
    EventLog(tmp_path / "events.jsonl").close()
    assert report(tmp_path, as_json=False) == 1
    assert "no finished step" in capsys.readouterr().out


def test_a_link_to_nowhere_is_an_error_that_names_the_fix(tmp_path):
    (tmp_path / "latest").symlink_to("gone")
    with pytest.raises(UserError, match="name the folder of a run, such as runs/latest"):
        report(tmp_path / "latest", as_json=False)


@pytest.mark.parametrize(("done", "says"), [(1, "after 1 step that"), (4, "after 4 steps that")])
def test_a_resumed_run_is_called_one(done, says):
    assert f"Resumed {says} an earlier process did" in sentence(resumed_run(done))
    assert "Resumed" not in sentence(full_run())
