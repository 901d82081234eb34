import io

import pytest
from rich.console import Console

from nemo_war.telemetry.progress import Progress, progress, stage


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def out():
    return io.StringIO()


@pytest.fixture
def plain(out, clock):
    return Progress(Console(file=out, force_terminal=False), clock)


def test_a_stage_is_one_line_with_the_elapsed_seconds(plain, out, clock):
    clock.now += 12.34
    plain.stage("[war] 2 replicas are ready")
    assert out.getvalue() == "[   12.3 s] [war] 2 replicas are ready\n"


def test_plain_lines_come_at_the_start_now_and_then_and_at_the_end(plain, out, clock):
    with plain.progress("rollouts", total=12) as bar:
        for _ in range(12):
            clock.now += 1
            bar.advance()
    assert out.getvalue().splitlines() == [
        "[    0.0 s] rollouts: 0/12",
        "[    5.0 s] rollouts: 5/12",
        "[   10.0 s] rollouts: 10/12",
        "[   12.0 s] rollouts: done 12/12 in 12.0 s",
    ]


def test_slow_units_get_a_line_each(plain, out, clock):
    with plain.progress("steps", total=3) as bar:
        for _ in range(3):
            clock.now += 60
            bar.advance()
    assert [line[12:] for line in out.getvalue().splitlines()] == [
        "steps: 0/3", "steps: 1/3", "steps: 2/3", "steps: done 3/3 in 180.0 s",
    ]  # fmt: skip


def test_work_of_unknown_length_is_counted(plain, out, clock):
    with plain.progress("compiling") as bar:
        clock.now += 6
        bar.advance(2)
    assert [line[12:] for line in out.getvalue().splitlines()] == [
        "compiling ...", "compiling: 2", "compiling: done 2 in 6.0 s",
    ]  # fmt: skip


def test_work_that_failed_says_where_it_stopped_and_lets_the_error_pass(plain, out):
    def work() -> None:
        with plain.progress("rollouts", total=12) as bar:
            bar.advance(7)
            raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        work()
    assert out.getvalue().splitlines()[-1].endswith("rollouts: STOPPED at 7/12 in 0.0 s")


@pytest.mark.parametrize("fails", [False, True])
def test_a_terminal_gets_a_bar_that_leaves_one_line(out, clock, fails, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Progress(Console(file=out, force_terminal=True, width=80), clock)
    try:
        with terminal.progress("[war] rollouts", total=4) as bar:
            bar.advance(4)
            terminal.stage("a line meanwhile")
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    text = out.getvalue()
    assert "4/4" in text
    assert "[war] rollouts" in text
    assert text.splitlines()[-1].endswith("STOPPED at 4/4 in 0.0 s" if fails else "done 4/4 in 0.0 s")
    assert text.rstrip().count("\x1b[?25l") == text.count("\x1b[?25h")  # the cursor is shown again


def test_bars_may_nest(out, clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Progress(Console(file=out, force_terminal=True, width=80), clock)
    with terminal.progress("steps", total=1) as steps:
        with terminal.progress("rollouts", total=2) as rollouts:
            rollouts.advance(2)
        steps.advance()
    assert "steps: done 1/1" in out.getvalue()


def test_standard_output_stays_clean(capsys):
    with progress("rollouts", total=1) as bar:
        bar.advance()
    stage("ready")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "rollouts: done 1/1" in captured.err
    assert "ready" in captured.err
