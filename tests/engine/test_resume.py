"""A run that is stopped between two steps and started again, as a user does it: real engines, real weights.

The engines' draws depend on which requests meet in a batch, so that two runs say different things; what
must agree is what the resumed run begins with, and how well it drafts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.processes import wait_until_gone

pytestmark = [pytest.mark.engine, pytest.mark.full]

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "examples" / "configs" / "grpo_embedded_cpu_smoke.yaml"
STEPS = 2
LOAD = [
    f"grpo.max_num_steps={STEPS}", "grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=6",
    "data.num_prompts=2", "policy.generation.max_new_tokens=96", "policy.generation.temperature=0.3",
]  # fmt: skip
"""Enough, and sure enough, that the acceptance of a step is not chance; both steps have the same prompts."""


def command(run_dir: Path, checkpoints: Path) -> list[str]:
    own = ["checkpointing.enabled=true", f"checkpointing.checkpoint_dir={checkpoints}"]
    more = [*LOAD, *own, "checkpointing.save_period=1", "--run-dir", str(run_dir)]
    return [sys.executable, "-m", "nemo_war.cli", "run", str(SMOKE), *more]


def finish(run_dir: Path, checkpoints: Path) -> str:
    """Run to the end; returns what was said."""
    done = subprocess.run(command(run_dir, checkpoints), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def interrupt_after_the_first_step(run_dir: Path, checkpoints: Path) -> None:
    """Stop the run in the rollouts of its second step."""
    process = subprocess.Popen(
        command(run_dir, checkpoints),
        env=os.environ | {"NEMO_WAR_TEST_MARK": str(run_dir)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if f"step 2/{STEPS}: live rollouts" in line:
            break
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert wait_until_gone(run_dir) == []


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [record for record in events if record["kind"] == kind]


def acceptance_length(run_dir: Path, step: int) -> float:
    replicas = [record for record in records(run_dir, "ReplicaRecord") if record["step"] == step]
    drafts = sum(record["drafts"] for record in replicas)
    assert drafts > 10, "so few drafts say nothing"
    return 1 + sum(record["accepted_tokens"] for record in replicas) / drafts


def info(checkpoints: Path, step: int) -> dict[str, Any]:
    return json.loads((checkpoints / f"step_{step}" / "training_info.json").read_text())


def test_a_run_that_was_interrupted_goes_on_where_it_was_and_drafts_as_well(tmp_path: Path) -> None:
    whole, stopped, resumed = (tmp_path / name for name in ("whole", "stopped", "resumed"))
    finish(whole, tmp_path / "one")
    interrupt_after_the_first_step(stopped, tmp_path / "two")
    first = info(tmp_path / "two", 1)
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["step_1"]
    said = finish(resumed, tmp_path / "two")
    assert f"resuming from {tmp_path / 'two' / 'step_1'}: 1 of {STEPS} steps are done" in said

    (resume,) = records(resumed, "ResumeRecord")
    assert (resume["step"], resume["epoch"]) == (1, 2)
    assert resume["weights_digest"] == first["weights_digest"]
    assert [record["epoch"] for record in records(resumed, "RefitRecord")] == [2, 3]
    assert [record["epoch"] for record in records(whole, "RefitRecord")] == [1, 2, 3]
    assert [record["step"] for record in records(resumed, "StepRecord")] == [1]
    assert info(tmp_path / "two", 2)["epoch"] == info(tmp_path / "one", 2)["epoch"] == 3

    remembered = [
        max(r["history_tokens"] for r in records(run, "ReplicaRecord") if r["step"] == 1)
        for run in (whole, resumed)
    ]
    assert remembered[1] > 0.7 * remembered[0], "what the first step said is still there"
    uninterrupted, found = acceptance_length(whole, 1), acceptance_length(resumed, 1)
    print(f"acceptance length of the second step: {uninterrupted:.2f} in one go, {found:.2f} resumed")
    assert found >= 0.9 * uninterrupted

    again = subprocess.run(command(tmp_path / "again", tmp_path / "two"), capture_output=True, text=True)
    assert again.returncode == 2
    assert f"grpo.max_num_steps={STEPS}: allowed: above {STEPS}" in again.stderr
    assert not (tmp_path / "again").exists()
