"""The doctor, where there is no NeMo-RL, and what it makes of what others tell it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nemo_war.cli import main
from nemo_war.doctor import installation, probe, versions, worker
from nemo_war.doctor.finding import Finding, Section, State, fail
from nemo_war.doctor.interpreter import ASYNCHRONOUS, Interpreter, interpreter
from nemo_war.doctor.remedy import remedy
from nemo_war.doctor.report import Report, show
from nemo_war.generation.nemo_rl import contract
from tests.recipes import EXEMPLAR

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_nemo_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nemo_rl", None)


# --- the command ---------------------------------------------------------------------------


@pytest.mark.usefixtures("no_nemo_rl")
def test_without_nemo_rl_there_is_one_failure_with_a_fix(capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAIL") == 1
    assert f"FAIL  nemo_rl: not importable by {sys.executable}\n        -> in NeMo-RL's checkout: " in printed
    assert printed.endswith("To mend: 1.\n")


@pytest.mark.usefixtures("no_nemo_rl")
def test_json_is_one_object_and_nothing_else(capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor", "--json", "--config", str(EXEMPLAR), "cluster.gpus_per_node=8"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["ok"], report["failures"], report["plan"]) == (1, False, 1, {})
    assert [each["title"] for each in report["sections"]] == ["Versions", "NeMo-RL", f"Recipe {EXEMPLAR}"]
    (missing,) = report["sections"][1]["findings"]
    assert missing.keys() == {"state", "about", "says", "fix", "facts"}
    assert missing["state"] == "fail"
    assert missing["fix"]


@pytest.mark.usefixtures("no_nemo_rl")
def test_json_without_a_recipe_has_no_plan(capsys: pytest.CaptureFixture) -> None:
    main(["doctor", "--json"])
    assert json.loads(capsys.readouterr().out)["plan"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["grpo.seed=1"], "grpo.seed=1: overrides are those of a recipe; name one with --config YAML"),
        (["--config", "nowhere.yaml"], "--config='nowhere.yaml': allowed: a YAML file that exists"),
        (["--jsn"], "unknown argument --jsn"),
    ],
)
def test_a_wrong_call_is_one_line_and_status_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["doctor", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"nemo-war: error: {says}")
    assert printed.err.count("\n") == 1


def test_help_has_an_example(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "example: nemo-war doctor --config " in capsys.readouterr().out


def test_it_runs_where_numba_cannot_be_imported() -> None:
    """That is what it has to tell of: NeMo-RL's own environment has none."""
    script = "import sys; sys.modules.update(numba=None, nemo_rl=None); from nemo_war.cli import main; "
    command = [sys.executable, "-c", f"{script}sys.exit(main(['doctor']))"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    assert "To mend: 1." in done.stdout


# --- versions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vllm", "takes"),
    [
        ("0.20.0", False),
        ("0.24.3", False),
        ("0.25.1", True),
        ("0.25.1+cpu", True),
        ("1.0", True),
        ("x", True),
    ],
)
def test_drafts_need_vllm_0_25(vllm: str, takes: bool) -> None:
    assert versions.takes_drafter(vllm) is takes


def test_packages_that_only_megatron_needs_may_be_missing() -> None:
    found = {each.about: each.state for each in versions.judge(of(), of())}
    assert found.pop("megatron-core") is found.pop("transformer-engine") is State.NOTE
    assert set(found.values()) == {State.OK}


def test_an_older_vllm_of_the_workers_is_a_note_whatever_is_here() -> None:
    found = {each.about: each for each in versions.judge(of(), of(vllm="0.20.0"))}
    assert found["vllm"].state is State.NOTE
    assert "0.25.1 here, 0.20.0 for vLLM's workers" in found["vllm"].says


def test_workers_that_could_not_be_asked_are_not_spoken_of() -> None:
    assert [each.says for each in versions.judge({"ray": "2.60.0"}, None)] == ["2.60.0 here"]


def test_what_is_installed_is_found() -> None:
    found = versions.installed()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["numba"]
    assert found["nemo_rl"] is None or "nemo_rl" in sys.modules


# --- the contract --------------------------------------------------------------------------

_FACT = contract.FACTS[0]
_DIFFERS = f"{_FACT.name}: there is no such class"
_BACKEND = "nemo_rl.models.generation.vllm.vllm_backend"
_NO_VLLM = f"{_BACKEND}: cannot be imported: ImportError: vLLM is not installed."
_BROKEN = "nemo_rl.algorithms.grpo: cannot be imported: ModuleNotFoundError: No module named 'soundfile'"


@pytest.mark.parametrize(
    ("here", "there", "release", "states"),
    [
        ([], None, "FULL", [State.OK]),
        ([_NO_VLLM], [], "FULL", [State.OK]),
        ([_NO_VLLM], None, "FULL", [State.NOTE, State.OK]),
        ([_NO_VLLM], [_NO_VLLM], "FULL", [State.FAIL]),
        ([_BROKEN], [], "FULL", [State.FAIL]),
        ([_DIFFERS, _BROKEN], [], "FULL", [State.FAIL, State.FAIL]),
        ([_DIFFERS], [], "NO_DRAFTS", [State.NOTE]),
        ([_DIFFERS], [], None, [State.NOTE]),
    ],
    ids=[
        "all",
        "in workers",
        "not asked",
        "nowhere",
        "broken",
        "differs",
        "other release",
        "unknown release",
    ],
)
def test_a_name_that_is_nowhere_is_a_failure_but_in_another_release(
    here: list[str], there: list[str] | None, release: str | None, states: list[State]
) -> None:
    found = [*installation.judge_seams(here, there, release)]
    assert [each.state for each in found] == states
    assert all(each.fix for each in found if each.state is State.FAIL)


def test_only_modules_that_need_vllm_are_looked_for_in_the_workers() -> None:
    assert installation.for_workers([_NO_VLLM, _BROKEN, _DIFFERS]) == [_BACKEND]


# --- the workers' environment --------------------------------------------------------------


@pytest.mark.parametrize(
    ("registered", "environment", "path"),
    [
        ("/usr/bin/python3", {}, "/usr/bin/python3"),
        ("uv run --locked --extra vllm", {}, f"/rl/venvs/{ASYNCHRONOUS}/bin/python"),
        ("uv run", {"NEMO_RL_VENV_DIR": "/opt/ray_venvs/"}, f"/opt/ray_venvs/{ASYNCHRONOUS}/bin/python"),
    ],
)
def test_the_workers_python_is_found_by_nemo_rls_rules(
    registered: str, environment: dict[str, str], path: str
) -> None:
    assert str(interpreter(registered, ASYNCHRONOUS, environment, "/rl/venvs").path) == path


def test_an_environment_that_is_made_at_the_start_is_no_failure() -> None:
    assert worker.unmade(Interpreter(Path("/none"), made_at_start=True)).state is State.NOTE
    assert worker.unmade(Interpreter(Path("/none"), made_at_start=False)).state is State.FAIL


def test_a_worker_answers_in_json_whatever_its_imports_print(tmp_path: Path) -> None:
    answer = ask(
        tmp_path,
        """
import sys
from nemo_war.doctor import probe
probe.answer = lambda modules: print("noise") or {"modules": modules, **dict.fromkeys(probe.KEYS)}
print("noise, too", file=sys.stderr)
probe.main(sys.argv[3:])
""",
    )
    assert not isinstance(answer, Finding), answer.says
    assert answer["modules"] == ["some.module"]


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (
            "import nothere",
            "exit status 1); the last it said: ",
        ),
        ("print('hello')", "exit status 0); the last it said: hello"),
        ("print('{}')", "exit status 0); the last it said: {}"),
        ("import os, sys; sys.stdout.close(); os._exit(3)", "exit status 3); the last it said: nothing"),
    ],
)
def test_anything_else_is_a_failure_with_its_last_lines(tmp_path: Path, script: str, says: str) -> None:
    found = ask(tmp_path, script)
    assert isinstance(found, Finding)
    assert found.state is State.FAIL
    assert says in found.says
    assert found.fix


def test_a_worker_without_nemo_war_is_told_how_to_get_it() -> None:
    said = "python: Error while finding module specification: No module named 'nemo_war'"
    found = worker.read("", said, 1)
    assert isinstance(found, Finding)
    assert found.fix is not None
    assert "PYTHONPATH" in found.fix


def test_a_worker_that_hangs_is_given_up_with_all_that_it_started(tmp_path: Path) -> None:
    began = time.monotonic()
    found = ask(tmp_path, "import subprocess; subprocess.run(['sleep', '60'])", timeout_s=1.0)
    assert time.monotonic() - began < 30
    assert isinstance(found, Finding)
    assert "did not answer within 1 s" in found.says


def test_what_cannot_be_started_is_said(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("")
    found = worker.ask(Interpreter(python, made_at_start=False), [], 1.0)
    assert isinstance(found, Finding)
    assert "cannot be started" in found.says


def test_workers_find_this_package_as_launch_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    script = """
import json, os
from nemo_war.doctor import probe
print(json.dumps({"path": os.environ["PYTHONPATH"], **dict.fromkeys(probe.KEYS)}))
"""
    answer = ask(tmp_path, script)
    assert not isinstance(answer, Finding), answer.says
    assert answer["path"] == f"{ROOT}{os.pathsep}/somewhere"


def test_an_answer_that_has_all_is_well() -> None:
    assert {each.state for each in judged()} == {State.OK}


def test_imports_that_fail_for_one_reason_are_one_failure() -> None:
    why = "ImportError: Numba needs NumPy 2.4 or less. Got NumPy 2.5."
    found = {each.about: each for each in judged(imports={"numba": why, "vllm": None, "ours": why})}
    assert found["imports"].says == f"numba, ours: {why}"
    assert "numba==" in (found["imports"].fix or "")
    assert found["drafter"].state is State.OK


def test_what_only_drafts_need_may_be_missing_without_them() -> None:
    why = "ModuleNotFoundError: No module named 'numba'"
    found = {
        each.about: each.state for each in judged(False, imports={"numba": why, "vllm": None}, drafter=why)
    }
    assert found["imports"] is State.NOTE
    found = {each.about: each.state for each in judged(False, imports={"vllm": why}, drafter=why)}
    assert found["imports"] is State.FAIL


@pytest.mark.parametrize(("drafting", "state"), [(None, State.NOTE), (True, State.FAIL), (False, State.OK)])
def test_a_vllm_without_our_drafter_is_a_failure_where_drafts_are_wanted(
    drafting: bool | None, state: State
) -> None:
    found = {each.about: each.state for each in judged(drafting, drafter="ValidationError: custom_class")}
    assert found["drafter"] is state


def test_another_copy_of_this_package_is_a_note() -> None:
    found = {each.about: each.state for each in judged(nemo_war="/elsewhere")}
    assert found["nemo_war"] is State.NOTE


def test_a_probe_says_of_each_module_why_it_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def importer(name: str) -> Any:
        raise ImportError(f"no\n  {name}")

    monkeypatch.setattr(probe, "_take_drafter", lambda: None)
    answer = probe.answer([_BACKEND], importer)
    assert answer.keys() == probe.KEYS
    assert answer["imports"] == {name: f"ImportError: no {name}" for name in probe.MODULES}
    assert answer["contract"] == [f"{_BACKEND}: cannot be imported: ImportError: no {_BACKEND}"]
    assert answer["drafter"] is None


def test_there_is_a_remedy_for_everything() -> None:
    assert "NRL_FORCE_REBUILD_VENVS" in remedy("x", "ModuleNotFoundError: No module named 'vllm'")
    assert "numba" in remedy("nemo_war.speculative.proposer", "ModuleNotFoundError: No module named 'numba'")
    assert remedy("x", "anything")


def test_a_report_wraps_what_is_read_and_leaves_whole_what_is_copied(capsys: pytest.CaptureFixture) -> None:
    path, fix = "/a/folder/" * 12 + "recipe.yaml", "set " + "a.key.that.is.long=1 " * 8
    report = Report([Section(f"Recipe {path}", [fail("about", "words " * 30, fix.strip())])])
    show(report, Console(highlight=False, width=80))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Recipe {path}"
    assert lines[1].startswith("  FAIL  about: words words")
    assert lines[2].startswith("        words")
    assert lines[3] == f"        -> {fix.strip()}"
    assert lines[-1] == "To mend: 1."


def ask(folder: Path, script: str, timeout_s: float = 60.0) -> worker.Answer | Finding:
    """What becomes of a Python that runs this script in place of the probe."""
    (folder / "script.py").write_text(script)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder}/script.py" "$@"\n')
    python.chmod(0o755)
    return worker.ask(Interpreter(python, made_at_start=True), ["some.module"], timeout_s)


def judged(drafting: bool | None = None, **changes: Any) -> list[Finding]:
    """Findings in an answer that is well but for these changes."""
    answer = {
        "nemo_war": probe.folder(),
        "imports": dict.fromkeys(probe.MODULES),
        "drafter": None,
        "contract": [],
        "versions": of(),
    }
    return [*worker.judge(Interpreter(Path("/p"), made_at_start=True), answer | changes, drafting)]


def of(**changes: str) -> dict[str, str | None]:
    """Versions of an installation as NeMo-RL locks it."""
    return {
        "python": "3.13.14",
        "nemo_rl": "0.6.0",
        "vllm": "0.25.1",
        "megatron-core": None,
        "transformer-engine": None,
        **changes,
    }
