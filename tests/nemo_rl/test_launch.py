"""The door: a stock script, a stock configuration with our block, or what is wrong with it in a line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXEMPLAR = "examples/configs/grpo_math_1B.yaml"
SCRIPT = """
import sys
from nemo_rl.models.generation.vllm import VllmGeneration
print("ran", VllmGeneration.__module__.split(".")[0], *sys.argv[1:])
"""


def launch(tmp_path: Path, *overrides: str, checkout: str = "NEMO_RL_PATH") -> subprocess.CompletedProcess:
    path = os.environ[checkout]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ours = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-m", "nemo_war.launch", script, "--config", f"{path}/{EXEMPLAR}", *overrides],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(map(str, (ours, path, tmp_path))),
            "NRL_IGNORE_VERSION_MISMATCH": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_without_the_block_nothing_of_nemo_rl_is_touched(tmp_path: Path) -> None:
    done = launch(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ran nemo_rl --config" in done.stdout


def test_with_it_the_script_is_given_our_generation_and_its_own_arguments(tmp_path: Path) -> None:
    done = launch(tmp_path, "++policy.generation.war.enabled=true")
    assert done.returncode == 0, done.stderr
    assert "ran nemo_war --config" in done.stdout
    assert done.stdout.strip().endswith("++policy.generation.war.enabled=true")


def test_a_conflict_is_one_line_and_the_script_is_not_run(tmp_path: Path) -> None:
    done = launch(
        tmp_path,
        "++policy.generation.war.enabled=true",
        "++policy.generation.vllm_kwargs.async_scheduling=true",
    )
    assert done.returncode == 2
    assert "ran" not in done.stdout
    assert "policy.generation.vllm_kwargs.async_scheduling" in done.stderr.splitlines()[-1]


def test_no_script_or_no_configuration_is_said(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nemo_war.launch"]
    done = subprocess.run([*command, "none.py", "--config", "x"], capture_output=True, text=True)
    assert (done.returncode, "none.py" in done.stderr) == (2, True)


release_0_7 = pytest.mark.skipif(
    "NEMO_RL_0_7_PATH" not in os.environ, reason="NEMO_RL_0_7_PATH names no checkout of NeMo-RL 0.7"
)


@release_0_7
def test_release_0_7_is_placed_for_and_does_not_draft(tmp_path: Path) -> None:
    enabled = "++policy.generation.war.enabled=true"
    refused = launch(tmp_path, enabled, checkout="NEMO_RL_0_7_PATH")
    assert refused.returncode == 2
    assert "speculative.enabled=false" in refused.stderr.splitlines()[-1]
    done = launch(
        tmp_path, enabled, "++policy.generation.war.speculative.enabled=false", checkout="NEMO_RL_0_7_PATH"
    )
    assert done.returncode == 0, done.stderr
    assert "ran nemo_war" in done.stdout


@pytest.mark.skipif(
    "NEMO_RL_0_6_PATH" not in os.environ, reason="NEMO_RL_0_6_PATH names no checkout of NeMo-RL 0.6"
)
def test_an_older_release_is_refused(tmp_path: Path) -> None:
    (tmp_path / "decord.py").touch()  # which 0.6 imports, and later ones do not
    refused = launch(tmp_path, "++policy.generation.war.enabled=true", checkout="NEMO_RL_0_6_PATH")
    assert refused.returncode == 2
    assert "older than 0.7" in refused.stderr.splitlines()[-1]
