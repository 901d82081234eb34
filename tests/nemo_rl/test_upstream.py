"""NeMo-RL's own tests of generation that need no GPU: what passes with its backend passes with ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
CHECKOUT = Path(os.environ["NEMO_RL_PATH"])
FILES = (
    "models/generation/test_fleet_health.py",
    "models/generation/test_generation_router.py",
    "models/generation/test_vllm_backend.py",
    "models/generation/test_vllm_shard_selection.py",
    "models/generation/test_vllm_sparse_refit.py",
    "models/generation/test_vllm_spec_decode_clamp.py",
    "models/generation/test_vllm_utils.py",
    "experience/test_rollout_generation_failures.py",
    "experience/test_rollout_manager.py",
    "experience/test_rollouts.py",
    "single_controller/test_router_membership.py",
    "single_controller/test_single_controller_setup.py",
    "algorithms/test_grpo.py",
)
_LIMIT_S = 1200

pytestmark = pytest.mark.skipif(
    not (CHECKOUT / "tests/unit").is_dir(), reason="the checkout has no tests: NeMo-RL's are in tests/unit"
)


def outcomes(report: Path, *options: str) -> dict[str, str]:
    """How each test ended."""
    files = [f"tests/unit/{name}" for name in FILES if (CHECKOUT / "tests/unit" / name).exists()]
    ours = ("-q", "--maxfail=1000", "--timeout=120", f"--junitxml={report}", "-p", "own_ray")
    command = [sys.executable, "-m", "pytest", *files, *ours, *options]
    # Plugins go by their file's name: NeMo-RL has a package `tests` of its own.
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    log = report.with_suffix(".log")
    with log.open("w") as output:
        subprocess.run(
            command,
            cwd=CHECKOUT,
            env=os.environ | {"PYTHONPATH": path},
            stdout=output,
            stderr=output,
            timeout=_LIMIT_S,
        )
    assert report.exists(), log.read_text()[-4000:]
    ended = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        ended[name] = kinds.pop() if kinds else "passed"
    return ended


def test_what_passes_with_nemo_rls_backend_passes_with_ours(tmp_path: Path) -> None:
    before = outcomes(tmp_path / "before.xml")
    after = outcomes(tmp_path / "after.xml", "-p", "swapped")
    print(f"\nNeMo-RL's own tests, stock: {dict(Counter(before.values()))}")
    print(f"NeMo-RL's own tests, ours:  {dict(Counter(after.values()))}")
    assert "passed" in before.values()
    changed = {name: (was, after.get(name)) for name, was in before.items() if after.get(name) != was}
    assert not changed, "\n".join(f"{name}: {was} -> {now}" for name, (was, now) in changed.items())
