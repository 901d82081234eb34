"""The main job as a user runs it: a process of its own, its files, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_war.telemetry.log import FILE_NAME, read
from nemo_war.telemetry.records import TurnRecord
from tests.engine.processes import wait_until_gone

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
BLOCK = 32
"""Tokens, as the smoke run sets it."""
SMOKE = ROOT / "examples" / "configs" / "grpo_embedded_cpu_smoke.yaml"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "nemo_war.cli", *arguments]


def test_the_comparison_runs_reports_and_leaves_no_process(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = subprocess.run(
        command("run", str(SMOKE), "--compare", "--json", "--run-dir", str(run_dir)),
        env=os.environ | {"NEMO_WAR_TEST_MARK": str(run_dir)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary == json.loads((run_dir / "summary.json").read_text())
    assert set(summary["modes"]) == {"baseline", "sticky", "war"}
    assert summary["invariants"]["ok"] is True
    assert summary["modes"]["war"]["draft_tokens"] > 0, "WAR never drafted"
    assert summary["modes"]["baseline"]["draft_tokens"] == 0
    assert_later_turns_found_the_kv_of_earlier_ones(run_dir)
    assert summary["modes"]["war"]["errors"] == 0
    assert all(refit["kv_reset_ok"] and refit["replicas"] == 2 for refit in summary["refits"])
    assert summary["history"]["tokens"] > 0
    assert wait_until_gone(run_dir) == []
    again = subprocess.run(command("report", str(run_dir)), capture_output=True, text=True, timeout=60)
    assert again.returncode == 0
    assert "Fixed work" in again.stdout
    taken = subprocess.run(
        command("run", str(SMOKE), "--run-dir", str(run_dir)), capture_output=True, text=True, timeout=60
    )
    assert taken.returncode == 2
    assert "already holds a run" in taken.stderr


def assert_later_turns_found_the_kv_of_earlier_ones(run_dir: Path) -> None:
    """Of WAR's trajectories, down to the last full block of the prompt before."""
    records = read(run_dir / FILE_NAME).records
    turns = [each for each in records if isinstance(each, TurnRecord) and each.run.mode == "war"]
    before = {(each.run, each.trajectory, each.turn + 1): each.prompt_tokens for each in turns}
    later = [each for each in turns if each.turn > 0]
    assert later
    for each in later:
        blocks = before[each.run, each.trajectory, each.turn] // BLOCK
        assert each.cached_tokens >= BLOCK * blocks, each


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_an_interrupted_run_leaves_no_process_and_says_so(tmp_path: Path, signum: signal.Signals) -> None:
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        command("run", str(SMOKE), "--run-dir", str(run_dir)),
        env=os.environ | {"NEMO_WAR_TEST_MARK": str(run_dir)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:  # the engines are up when the first rollouts begin
        if "live rollouts" in line:
            break
    process.send_signal(signum)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "interrupted" in said
    assert wait_until_gone(run_dir) == []


@pytest.mark.full
def test_a_run_with_a_shared_scheduler_does_the_same_work_without_an_outage(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    key = "policy.generation.war.routing.shared=true"
    done = subprocess.run(
        command("run", str(SMOKE), key, "--compare", "--json", "--run-dir", str(run_dir)),
        env=os.environ | {"NEMO_WAR_TEST_MARK": str(run_dir)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary["invariants"]["ok"] is True
    assert summary["modes"]["war"]["fallbacks"] == summary["live"]["war"]["fallbacks"] == 0
    assert summary["modes"]["baseline"]["fallbacks"] is None
    assert wait_until_gone(run_dir) == []


@pytest.mark.full
def test_ab_by_steps_shows_both_sides_of_one_live_run(tmp_path: Path) -> None:
    key = "policy.generation.war.ab_every=1"
    done = subprocess.run(
        command("run", str(SMOKE), key, "grpo.max_num_steps=4", "--json", "--run-dir", str(tmp_path / "run")),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary["ab"] is not None
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, events) if record["kind"] == "StepRecord"]
    assert [step["war_active"] for step in steps] == [True, False, True, False]
    drafted = dict.fromkeys(range(4), 0)
    for record in map(json.loads, events):
        if record["kind"] == "ReplicaRecord":
            drafted[record["step"]] += record["draft_tokens"]
    assert drafted[1] == drafted[3] == 0
