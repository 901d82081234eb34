"""The recipes for NeMo-RL in examples/configs, and what their headers say."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXEMPLAR = ROOT / "examples/configs/grpo_math_1B_war.yaml"
RECIPES = sorted((ROOT / "examples/configs/recipes").glob("*.yaml"))


def header(recipe: Path) -> str:
    """The comment that a file begins with, lines that end in a backslash joined to the next."""
    lines = takewhile(lambda line: line.startswith("#"), recipe.read_text().splitlines())
    return re.sub(r"\\\n\s*", "", "\n".join(line[2:] for line in lines))


def commands(recipe: Path) -> list[str]:
    """What its `# Usage:` lines say."""
    return re.findall(r"^Usage: (.+)$", header(recipe), re.MULTILINE)


def size(recipe: Path) -> tuple[int, int]:
    """Nodes and GPUs per node, by its name."""
    [(nodes, gpus)] = re.findall(r"-(\d+)n(\d+)g-", recipe.name)
    return int(nodes), int(gpus)
