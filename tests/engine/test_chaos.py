"""Chaos as a whole, on fakes of vLLM's interface: all else, Ray's processes among it, is real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.chaos_bench.run_plan import STEPS, Moment, RunFault
from tools.chaos_bench.runs import Job
from tools.chaos_bench.runs_result import RunsResult
from tools.chaos_bench.tiny import write_policy

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]


def chaos(folder: Path, *arguments: str) -> tuple[int, dict, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tools.chaos", "--folder", str(folder), *arguments],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
    )  # fmt: skip
    [line] = done.stdout.splitlines() or [done.stderr[-3000:]]
    return done.returncode, json.loads(line), done.stderr


def test_a_short_run_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    status, said, errors = chaos(
        tmp_path, "--faults", "12", "--replicas", "3", "--in-flight", "pause", "--kinds", "kill_turn",
        "kill_loading", "fail_load", "refuse_reset", "wrong_digest", "damage_import", "kill_scheduler",
    )  # fmt: skip
    assert status == 0, errors[-3000:]
    assert said["faults"] == 12
    assert not any(said[key] for key in ("lost", "duplicated", "stale_turns", "orphans"))
    assert said["started"] == said["finished"] > 100
    assert said["recovery_s"].keys() >= {"kill_turn", "refuse_reset"}


def test_stale_kv_is_found_out(tmp_path: Path) -> None:
    status, said, errors = chaos(tmp_path, "--sabotage", "--replicas", "2")
    assert status == 1
    assert said["stale_turns"] > 0
    assert f"chaos: {said['stale_turns']} stale: " in errors


@pytest.mark.full
def test_a_run_that_sigterm_stops_goes_on_and_leaves_nothing(tmp_path: Path) -> None:
    result = RunsResult(0)
    fault = RunFault(0, "sigterm_run", Moment(f"step 2/{STEPS}: live rollouts: 0/", 0.05), None, None, 1)
    Job(fault, tmp_path / "job", write_policy(tmp_path / "policy"), 1, result)()
    assert result.wrong == []
    assert (result.runs, result.expected, result.found) == (2, STEPS, STEPS)
    assert len(result.recoveries["sigterm_run"]) == 1
