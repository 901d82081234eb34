"""Who may import whom: policy stays pure, adapters stay at the edge."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nemo_war"

HEAVY = {"asyncio", "aiohttp", "ray", "vllm", "torch", "transformers", "safetensors", "nemo_rl"}
PURE = [
    "nemo_war.config",
    "nemo_war.errors",
    "nemo_war.checked_file",
    "nemo_war.snapshot",
    "nemo_war.metadata",
    "nemo_war.configuration",
    "nemo_war.routing",
    "nemo_war.speculative",
    "nemo_war.telemetry",
    "nemo_war.report",
    "nemo_war.simulation",
    "nemo_war.generation.refit",
    "nemo_war.generation.step_time",
    "nemo_war.generation.embedded.environments",
    "nemo_war.generation.placement_file",
    "nemo_war.generation.nemo_rl.affinity",
    "nemo_war.generation.nemo_rl.contract",
    "nemo_war.generation.nemo_rl.facts",
    *(
        f"nemo_war.doctor.{noun}"
        for noun in (
            "cluster",
            "features",
            "finding",
            "graphs",
            "host",
            "model",
            "placement",
            "plan",
            "remedy",
        )
    ),
    *(f"nemo_war.doctor.{noun}" for noun in ("report", "updates", "versions", "worker")),
]
"""Import none of HEAVY, not even inside a function."""
SHELLS = {
    "nemo_war.routing.dispatcher",
    "nemo_war.routing.http.exchange",
    "nemo_war.routing.http.queue",
    "nemo_war.routing.http.replicas",
    "nemo_war.routing.http.router",
    "nemo_war.routing.http.server",
    "nemo_war.routing.http.stream",
    "nemo_war.simulation.server",
}
"""The modules among these that wait and talk; no pure one imports them."""

MAY_IMPORT = {
    "nemo_war.errors": set(),
    "nemo_war.checked_file": {"errors"},
    "nemo_war.snapshot": {"errors", "checked_file"},
    "nemo_war.metadata": set(),
    "nemo_war.config": set(),
    "nemo_war.configuration": {"errors", "config"},
    "nemo_war.compat": set(),
    "nemo_war.kernel": set(),
    "nemo_war.routing": {"errors", "metadata", "config", "kernel", "snapshot"},
    "nemo_war.speculative": {"errors", "metadata", "config", "compat", "kernel", "checked_file", "snapshot"},
    "nemo_war.telemetry": {"errors"},
    "nemo_war.report": {"errors", "speculative", "telemetry"},
    "nemo_war.simulation": {"errors", "metadata", "config", "routing", "speculative"},
    "nemo_war.generation": {
        "errors",
        "metadata",
        "config",
        "configuration",
        "compat",
        "checked_file",
        "snapshot",
        "routing",
        "speculative",
        "telemetry",
        "report",
    },
    "nemo_war.doctor": {"errors", "config", "generation", "telemetry"},
    "nemo_war.launch": {"errors", "generation"},
    "nemo_war.cli": {
        "errors",
        "config",
        "doctor",
        "generation",
        "report",
        "routing",
        "speculative",
        "telemetry",
    },
}
"""Parts of the package that each part may import, besides itself."""

_STEP_TIME = "nemo_war.generation.step_time"
SHARED = {_STEP_TIME, f"{_STEP_TIME}.StepLoad", f"{_STEP_TIME}.StepTimeModel"}
"""The step-time model has one home and is used by pricing, placement and simulation alike."""


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(["nemo_war", *path.relative_to(PACKAGE).with_suffix("").parts])
        yield name.removesuffix(".__init__"), path


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a name lives"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize(
    ("name", "path"), modules(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_pure_modules_import_no_engine(name: str, path: Path) -> None:
    if name not in SHELLS and any(name == pure or name.startswith(pure + ".") for pure in PURE):
        heavy = {module.split(".")[0] for module in imports(path)} & HEAVY | imports(path) & SHELLS
        assert not heavy, f"{name} is pure and imports {sorted(heavy)}"


@pytest.mark.parametrize(
    ("name", "path"), modules(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_parts_import_only_what_lies_below_them(name: str, path: Path) -> None:
    if name == "nemo_war":
        return
    part = ".".join(name.split(".")[:2])
    own = part.split(".")[1]
    used = {module.split(".")[1] for module in imports(path) - SHARED if module.startswith("nemo_war.")} - {
        own,
        "__version__",
    }
    assert used <= MAY_IMPORT[part], f"{name} imports {sorted(used - MAY_IMPORT[part])}"


def test_every_part_of_the_package_has_a_rule() -> None:
    parts = {".".join(name.split(".")[:2]) for name, _ in modules()} - {"nemo_war"}
    assert parts <= set(MAY_IMPORT)


def test_no_module_grows_beyond_what_can_be_read_in_one_sitting() -> None:
    sizes = {name: len(path.read_text().splitlines()) for name, path in modules()}
    long = {name: size for name, size in sizes.items() if size > 480}
    assert not long
