"""Where there is no NeMo-RL, its double takes its place; where there is, tests of the double are left out."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a busy machine would fail by its own time limit
settings.load_profile("untimed")

DOUBLE = Path(__file__).parents[1] / "double"

if importlib.util.find_spec("nemo_rl") is None:
    sys.path.append(str(DOUBLE))
else:
    collect_ignore = [f"test_nemo_rl_{what}.py" for what in ("double", "generation", "seams", "worker")]
