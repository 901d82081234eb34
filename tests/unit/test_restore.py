"""A history to restore is looked at before any engine starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nemo_war.config import WarConfig
from nemo_war.errors import ConfigError
from nemo_war.generation.embedded.job import check_history
from nemo_war.speculative.history import SuffixHistory


def war(restore: Path | None, **more: object) -> WarConfig:
    history = {"restore": restore, **more}
    return WarConfig.model_validate({"speculative": {"history": history}})


def damaged(folder: Path) -> Path:
    history, path = SuffixHistory(4096, 4), folder / "replica-0.suffixes"
    history.end(history.begin("t", "g", 0, np.arange(100, dtype=np.int32)))
    history.save(str(path))
    path.write_bytes(path.read_bytes()[:-1])
    return folder


def test_a_history_that_is_whole_passes(tmp_path):
    SuffixHistory(4096, 4).save(str(tmp_path / "replica-0.suffixes"))
    check_history(war(tmp_path))
    check_history(war(None))


@pytest.mark.parametrize("make", [damaged, lambda folder: folder / "absent"])
def test_a_damaged_or_missing_one_names_the_key_and_the_way_out(tmp_path, make):
    path = make(tmp_path)
    with pytest.raises(ConfigError) as caught:
        check_history(war(path))
    assert caught.value.key == "policy.generation.war.speculative.history.restore"
    assert str(path) in str(caught.value)
    assert "empty_if_damaged=true" in caught.value.fix
    check_history(war(path, empty_if_damaged=True))


def test_a_link_means_what_it_pointed_at_when_the_run_began(tmp_path):
    """`runs/latest` is moved to the new run before the replicas open it."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    latest = tmp_path / "latest"
    latest.symlink_to("old")
    config = war(latest)
    latest.unlink()
    latest.symlink_to("new")
    assert config.speculative.history.restore == (tmp_path / "old").resolve()


def test_a_relative_path_is_made_absolute_as_other_processes_open_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # here, `runs/latest` may be a link
    assert war(Path("runs/latest")).speculative.history.restore == tmp_path / "runs/latest"
