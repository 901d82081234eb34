"""What NeMo-RL's workers are told of where this package is."""

from __future__ import annotations

import os
from pathlib import Path

from nemo_war.generation.nemo_rl.python_path import for_workers


def test_a_checkout_comes_first_and_the_rest_stays() -> None:
    assert for_workers("/a:/b".replace(":", os.pathsep), Path("/checkout")).split(os.pathsep) == [
        "/checkout",
        "/a",
        "/b",
    ]


def test_nothing_is_there_twice_and_nothing_is_empty() -> None:
    assert for_workers(f"/a{os.pathsep}", Path("/a")) == "/a", "an empty entry would be the working folder"
    assert for_workers("", Path("/a")) == "/a"


def test_an_environments_own_folder_is_left_out() -> None:
    assert for_workers("/a", Path("/venv/lib/python3.13/site-packages")) == "/a"
