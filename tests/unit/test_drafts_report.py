"""`nemo-war replay-drafts`: figures, tables, the plot, and what it says of bad input."""

from __future__ import annotations

import builtins
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from nemo_war.cli import main
from nemo_war.errors import UserError
from nemo_war.report import drafts
from nemo_war.speculative.history import SuffixHistory
from nemo_war.speculative.workload import Recorded


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run whose drafter remembers three attempts at one task."""
    folder = tmp_path_factory.mktemp("run")
    history = SuffixHistory(8192, 4)
    for epoch in range(3):
        slot = history.begin(f"t{epoch}", "g", epoch, np.array([1, 2, 3], np.int32))
        text = np.random.default_rng(0).permutation(500)[:80].astype(np.int32)
        history.extend(np.array([slot], np.int32), text[None], np.array([80], np.int32))
        history.end(slot)
    (folder / "history").mkdir()
    history.save(str(folder / "history" / "replica-0.suffixes"))
    return folder


@pytest.fixture(scope="module")
def figures(run) -> dict:
    from nemo_war.speculative.workload import read_trace

    return drafts.measure(read_trace(run, lambda text: []), 8)


def test_figures_show_what_history_is_worth(figures):
    first, second, third = figures["epochs"]
    assert first["tokens_per_step"] == first["tokens_per_step_own"] == 1
    assert second["tokens_per_step"] > 3 > second["tokens_per_step_own"]
    assert third["tokens_per_step"] >= second["tokens_per_step"]
    assert second["acceptance"] > 0.8


def test_goodput_falls_as_draft_tokens_cost_more_and_never_below_plain_decoding_by_much(figures):
    curve = [row["goodput"] for row in figures["cost_curve"]]
    assert curve == sorted(curve, reverse=True)
    assert curve[0] > 2
    assert curve[-1] > 0.95


def test_positions_are_reached_less_and_less(figures):
    reached = [row["verified"] for row in figures["positions"]]
    assert reached == sorted(reached, reverse=True)
    assert all(row["accepted"] <= row["verified"] for row in figures["positions"])


def test_the_tables_say_what_the_figures_say(figures):
    out = io.StringIO()
    drafts.print_figures(figures, Console(file=out, width=100))
    text = out.getvalue()
    assert "3 trajectories, 240 response tokens" in text
    assert f"{figures['cost_curve'][0]['goodput']:.2f}x" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_command_prints_json(run, capsys):
    assert main(["replay-drafts", str(run), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["trajectories"] == 3
    assert len(figures["cost_curve"]) == 6


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_plot_is_an_image(figures, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    drafts.draw(figures, tmp_path / f"drafts.{suffix}")
    assert (tmp_path / f"drafts.{suffix}").stat().st_size > 1000


@pytest.mark.parametrize("name", ["drafts.exe", "absent/drafts.svg"])
def test_a_plot_that_cannot_be_written_is_one_clear_error(figures, tmp_path, name):
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match=r"--plot .* name a \.png"):
        drafts.draw(figures, tmp_path / name)


def test_a_missing_matplotlib_says_how_to_get_it(figures, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install nemo-war\[plot\]"):
        drafts.draw(figures, tmp_path / "drafts.svg")


def test_traces_without_a_response_are_refused():
    only = Recorded("t", "g", 0, ((np.zeros(3, np.int32), np.zeros(1, np.int32)),))
    with pytest.raises(UserError, match="no response of two tokens"):
        drafts.measure([only], 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.json"], "absent.json: No such file"),
        (["--max-draft-tokens", "0", "x"], "--max-draft-tokens=0: allowed: 1 to 64"),
        (["--max-draft-tokens", "65", "x"], "--max-draft-tokens=65: allowed: 1 to 64"),
        (["--max-draft-tokens", "many", "x"], "invalid int value"),
        ([], "required: TRACE"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["replay-drafts", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_tokenizer_that_is_none_is_named(tmp_path, capsys):
    trace = tmp_path / "t.json"
    trace.write_text(
        json.dumps([{"task_id": 0, "trial": 0, "traj": [{"role": "assistant", "content": "x"}]}])
    )
    assert main(["replay-drafts", str(trace), "--tokenizer", str(tmp_path)]) == 2
    assert f"--tokenizer {tmp_path}" in capsys.readouterr().err
