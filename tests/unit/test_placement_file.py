"""What placement learned, as a file: read by the policy that wrote it, and refused by another."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_war.errors import UserError
from nemo_war.generation import placement_file
from nemo_war.routing.policies import make
from nemo_war.snapshot import State


def test_what_a_policy_learned_comes_back(tmp_path: Path) -> None:
    state = make("war").state()
    placement_file.write(tmp_path / "placement.state", state)
    placement_file.read(tmp_path / "placement.state", make("war"))


def test_a_policy_that_learns_nothing_leaves_no_file_and_needs_none(tmp_path: Path) -> None:
    placement_file.write(tmp_path / "placement.state", make("sticky").state())
    assert not (tmp_path / "placement.state").exists()
    placement_file.read(tmp_path / "placement.state", make("war"))


def test_what_makes_no_sense_to_the_policy_is_refused_by_the_files_name(tmp_path: Path) -> None:
    placement_file.write(tmp_path / "placement.state", State({}))
    with pytest.raises(UserError, match=r"placement\.state"):
        placement_file.read(tmp_path / "placement.state", make("war"))
