"""The command line: what it calls, what it prints, how it exits."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from nemo_war.cli import main
from nemo_war.errors import UserError

ROOT = Path(__file__).parents[2]
EXEMPLAR = str(ROOT / "examples/configs/grpo_embedded_cpu.yaml")


class Work:
    """Stands in for the job and the report; remembers how they were called."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.status = 0
        self.raises: BaseException | None = None

    def run(self, config, *, compare, run_dir):
        self.calls.append(("run", config, compare, run_dir))
        print("the table")
        if self.raises:
            raise self.raises
        return self.status

    def report(self, run, as_json):
        self.calls.append(("report", run, as_json))
        print('{"schema": 1}')
        return self.status


@pytest.fixture
def work(monkeypatch) -> Work:
    stand_in = Work()
    for name in ("nemo_war.generation.embedded.job", "nemo_war.report.main"):
        module = ModuleType(name)
        module.run, module.report = stand_in.run, stand_in.report
        monkeypatch.setitem(sys.modules, name, module)
    return stand_in


def test_run_hands_the_checked_configuration_to_the_job(work):
    overrides = ["grpo.seed=7", "grpo.max_num_steps=1"]
    assert main(["run", EXEMPLAR, overrides[0], "--compare", overrides[1], "--run-dir", "here"]) == 0
    ((_, config, compare, run_dir),) = work.calls
    assert (config.grpo.seed, config.grpo.max_num_steps, compare, run_dir) == (7, 1, True, Path("here"))


def test_run_takes_additions_before_and_after_options(work):
    extra = "++policy.generation.vllm_kwargs"
    main(["run", EXEMPLAR, f"{extra}.block_size=32", "--compare", f"{extra}.swap_space=0"])
    kwargs = work.calls[0][1].policy.generation.vllm_kwargs
    assert (kwargs["block_size"], kwargs["swap_space"]) == (32, 0)


def test_run_passes_on_the_status_of_the_job(work):
    work.status = 3
    assert main(["run", EXEMPLAR]) == 3


def test_run_json_prints_nothing_but_the_summary(work, capsys):
    assert main(["run", EXEMPLAR, "--json", "logger.log_dir=elsewhere"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"schema": 1}
    assert "the table" in printed.err
    assert work.calls[-1] == ("report", Path("elsewhere/latest"), True)


def test_run_json_reports_the_folder_that_was_named(work):
    main(["run", EXEMPLAR, "--json", "--run-dir", "here"])
    assert work.calls[-1] == ("report", Path("here"), True)


def test_a_failed_run_prints_no_summary(work, capsys):
    work.status = 1
    assert main(["run", EXEMPLAR, "--json"]) == 1
    assert capsys.readouterr().out == ""


def test_report_names_a_folder_and_a_format(work):
    assert main(["report", "runs/latest"]) == 0
    assert main(["report", "runs/latest", "--json"]) == 0
    assert work.calls == [("report", Path("runs/latest"), False), ("report", Path("runs/latest"), True)]


def test_check_prints_the_resolved_configuration(capsys):
    assert main(["check", EXEMPLAR, "grpo.num_prompts_per_step=5"]) == 0
    as_yaml = yaml.safe_load(capsys.readouterr().out)
    assert as_yaml["policy"]["train_global_batch_size"] == 20
    assert main(["check", EXEMPLAR, "--json", "grpo.num_prompts_per_step=5"]) == 0
    assert json.loads(capsys.readouterr().out) == as_yaml


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check", EXEMPLAR, "grpo.max_num_steps=0"], "grpo.max_num_steps=0: allowed: an integer"),
        (["run", EXEMPLAR, "--compare", "grpo.steps=0"], "grpo.steps=0"),
        (["run", "nowhere.yaml"], "config='nowhere.yaml': allowed: a YAML file that exists"),
        (["run"], "arguments are required: CONFIG, KEY=VALUE; see nemo-war run --help"),
        (["run", EXEMPLAR, "--comapre"], "unknown argument --comapre; see nemo-war --help"),
        (["run", EXEMPLAR, "--comp"], "unknown argument --comp"),
        (["report", "a", "b"], "unknown argument b"),
        (["walk"], "invalid choice: 'walk'"),
        ([], "required: COMMAND; see nemo-war --help"),
    ],
    ids=lambda part: " ".join(part[-2:]) if isinstance(part, list) else "",
)
def test_what_the_user_can_mend_is_one_line_and_status_2(work, capsys, arguments, says):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("nemo-war: error: ")
    assert says in printed.err
    assert printed.err.count("\n") == 1
    assert work.calls == []


def test_an_error_of_the_job_is_one_line_and_status_2(work, capsys):
    work.raises = UserError("the wheel is missing;\n  install it")
    assert main(["run", EXEMPLAR]) == 2
    assert capsys.readouterr().err == "nemo-war: error: the wheel is missing; install it\n"


def test_sigterm_is_an_interruption_before_the_job_handles_it(work, capsys, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(work, "run", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    sys.modules["nemo_war.generation.embedded.job"].run = work.run
    assert main(["run", EXEMPLAR]) == 130
    assert capsys.readouterr().err == "nemo-war: interrupted\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interruption_is_status_130(work, capsys):
    work.raises = KeyboardInterrupt()
    assert main(["run", EXEMPLAR]) == 130
    assert capsys.readouterr().err == "nemo-war: interrupted\n"


def test_an_error_of_ours_is_not_hidden(work):
    work.raises = RuntimeError("a defect")
    with pytest.raises(RuntimeError, match="a defect"):
        main(["run", EXEMPLAR])


@pytest.mark.parametrize("command", [[], ["run"], ["report"], ["check"]], ids=" ".join)
def test_help_ends_with_an_example(capsys, command):
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--help"])
    assert exit_.value.code == 0
    assert f"example: nemo-war {' '.join(command) or 'run'}" in capsys.readouterr().out


def test_the_module_runs_and_survives_a_reader_that_leaves():
    command = f"{sys.executable} -m nemo_war.cli check {EXEMPLAR} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("grpo:\n", "")
