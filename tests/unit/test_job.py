"""What of the main job needs no engine: its environment, and how it takes interruptions and full disks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

import pytest
import ray

from nemo_war.generation.embedded import job
from nemo_war.report import summary
from nemo_war.telemetry.log import FILE_NAME, EventLog


@pytest.mark.parametrize(("given", "first"), [("/users/own:/more", ["/users/own", "/more"]), (None, [])])
def test_replicas_look_for_modules_where_the_run_does(
    monkeypatch: pytest.MonkeyPatch, given: str | None, first: list[str]
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", lambda **arguments: asked.update(arguments))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if given:
        monkeypatch.setenv("PYTHONPATH", given)
    job._start_ray()
    paths = asked["runtime_env"]["env_vars"]["PYTHONPATH"].split(os.pathsep)
    assert paths == [*first, str(Path(__file__).parents[2])]


def test_sigterm_while_ray_starts_is_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    def terminated(**_: object) -> NoReturn:
        raise SystemExit(1)  # as Ray's own handler does

    monkeypatch.setattr(ray, "init", terminated)
    with pytest.raises(KeyboardInterrupt):
        job._start_ray()


def test_a_full_disk_costs_the_summary_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    EventLog(tmp_path / FILE_NAME).close()

    def full(*_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(summary, "write", full)
    job._summarize(tmp_path)
    said = " ".join(capsys.readouterr().err.split())
    assert "WARNING: summary.json could not be written: No space left on device; nemo-war report" in said
