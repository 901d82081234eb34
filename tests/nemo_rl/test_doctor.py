"""The doctor with NeMo-RL: a sound installation has nothing to mend, and every recipe has a plan."""

from __future__ import annotations

import json
import os
import random
import re
import sys
from pathlib import Path

import pytest
from vllm.config import CompilationConfig

from nemo_war.cli import main
from nemo_war.doctor import graphs, interpreter, probe, worker
from nemo_war.doctor.finding import State
from nemo_war.doctor.plan import plan
from nemo_war.doctor.versions import installed
from nemo_war.generation.nemo_rl import contract, seams
from nemo_war.generation.nemo_rl.block import war_of
from nemo_war.generation.nemo_rl.recipe import generation_of, load
from tests.recipes import EXEMPLAR, RECIPES, header, size

STOCK = f"{os.environ.get('NEMO_RL_PATH')}/examples/configs/grpo_math_1B.yaml"
WELL = {
    "nemo_war": probe.folder(),
    "imports": dict.fromkeys(probe.MODULES),
    "drafter": None,
    "contract": [],
    "versions": {},
}


@pytest.fixture
def well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers' environment is sound, and is not asked."""
    monkeypatch.setattr(worker, "ask", lambda *_: WELL | {"versions": installed()})


def test_a_sound_installation_has_nothing_to_mend(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one test here that asks the workers' environment; on a busy machine that takes its time."""
    monkeypatch.setattr(worker, "TIMEOUT_S", 300.0)
    status = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    found = {
        (section["title"], each["about"]): each
        for section in report["sections"]
        for each in section["findings"]
    }
    assert status == 0, [each for each in found.values() if each["state"] == "fail"]
    assert found["NeMo-RL", "release"]["facts"] == {"release": "FULL"}
    assert found["NeMo-RL", "seams"]["facts"] == {"names": len(contract.FACTS)}
    assert found["vLLM's workers", "environment"]["facts"] == {"python": sys.executable}
    assert found["vLLM's workers", "drafter"]["state"] == "ok"
    versions = found["Versions", "vllm"]["facts"]
    assert versions["here"] == versions["worker"] is not None


@pytest.mark.parametrize("recipe", [EXEMPLAR, *RECIPES], ids=lambda path: path.stem)
def test_every_recipe_has_a_plan(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (recipe, *RECIPES):
        for name in re.findall(r"export (\w+)=\.\.\.", header(each)):
            if name != "NEMO_RL_PATH":
                monkeypatch.setenv(name, f"/{name}")
    config = load(["--config", str(recipe)])
    findings = [*plan(config, war_of(generation_of(config)))]
    assert [each for each in findings if each.state is State.FAIL] == []
    facts = {key: value for each in findings for key, value in each.facts.items()}
    assert facts["gpus"] == facts["replicas"] * facts["tensor_parallel"] * facts["pipeline_parallel"]
    if recipe != EXEMPLAR:
        nodes, gpus = size(recipe)
        assert facts["gpus"] <= nodes * gpus
    if facts["max_draft_tokens"]:
        assert facts["cuda_graph_requests"] >= 16


@pytest.mark.usefixtures("well")
def test_a_recipe_is_said_below_the_installation(capsys: pytest.CaptureFixture) -> None:
    overrides = ["++policy.generation.war.enabled=true", "cluster.gpus_per_node=8"]
    assert main(["doctor", "--json", "--config", STOCK, *overrides]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["sections"][-1]["title"] == f"Recipe {STOCK}"
    assert report["plan"]["replicas"] == 8


@pytest.mark.usefixtures("well")
@pytest.mark.parametrize(
    ("override", "says", "fix"),
    [
        (
            "++policy.generation.vllm_kwargs.async_scheduling=true",
            "policy.generation.vllm_kwargs.async_scheduling=True: allowed: null or false, as vLLM schedules",
            "remove it, or set policy.generation.war.speculative.enabled=false",
        ),
        (
            "++policy.generation.war.speculative.max_draft_token=4",
            "policy.generation.war.speculative.max_draft_token=4: unknown key; allowed: ",
            "did you mean policy.generation.war.speculative.max_draft_tokens? ",
        ),
        (
            "grpo.nothere=4",
            "grpo.nothere='4': allowed: keys that the recipe has; a new one needs ++",
            "write ++grpo.nothere=4",
        ),
        (
            "policy.generation.vllm_cfg.tensor_parallel_size=3",
            "policy.generation.vllm_cfg.tensor_parallel_size=3: allowed: sizes whose product divides",
            "set policy.generation.vllm_cfg.tensor_parallel_size=1",
        ),
        (
            "policy.generation=null",
            "policy.generation=None: allowed: a block",
            "take a recipe that generates",
        ),
        ("~policy.generation.colocated", "a key of NeMo-RL's is missing", "complete the recipe"),
    ],
    ids=["conflict", "typing error", "new key", "odd", "no generation", "incomplete"],
)
def test_a_broken_recipe_is_a_failure_in_a_jobs_own_words(
    override: str, says: str, fix: str, capsys: pytest.CaptureFixture
) -> None:
    enabled = "++policy.generation.war.enabled=true"
    assert main(["doctor", "--json", "--config", STOCK, enabled, override]) == 1
    report = json.loads(capsys.readouterr().out)
    (failed,) = [each for each in report["sections"][-1]["findings"] if each["state"] == "fail"]
    assert failed["says"].startswith(says)
    assert failed["fix"].startswith(fix)


def test_the_workers_are_those_that_ours_stand_in_for() -> None:
    assert {interpreter.ASYNCHRONOUS, interpreter.SYNCHRONOUS} == set(seams.WORKERS)
    python = interpreter.of_nemo_rl(interpreter.ASYNCHRONOUS)
    assert (str(python.path), python.made_at_start) == (sys.executable, False)


def test_the_graphs_that_are_left_are_those_that_vllm_leaves() -> None:
    chance = random.Random(0)
    for _ in range(300):
        sizes = sorted(chance.sample(range(1, 520), chance.randint(1, 12)))
        tokens = chance.randint(2, 65)
        stock = CompilationConfig(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1])
        try:
            stock.adjust_cudagraph_sizes_for_spec_decode(tokens, 1)
        except ValueError:
            stock.cudagraph_capture_sizes = []
        assert graphs.left(sizes, tokens) == stock.cudagraph_capture_sizes, (sizes, tokens)
