"""Asked where NeMo-RL's vLLM workers run: what can be imported there, and does vLLM take our drafter?

python -m nemo_war.doctor.probe [MODULE ...] prints one JSON object; `answer` says what is in it.
Modules are those of NeMo-RL that could not be imported elsewhere, to be held against `contract`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

OURS = "nemo_war.generation.nemo_rl"
MODULES = (
    "numba",
    "xxhash",
    "pydantic",
    "vllm",
    "nemo_rl",
    "nemo_war.speculative.proposer",
    f"{OURS}.extension",
    f"{OURS}.worker",
)
"""What a worker imports, or what that stands on first."""
FOR_DRAFTS = frozenset({"numba", "nemo_war.speculative.proposer"})
"""Of these, what only an engine that drafts needs."""


KEYS = frozenset({"nemo_war", "imports", "drafter", "contract", "versions"})
"""Of an answer."""


def answer(modules: Sequence[str], importer: Callable[[str], ModuleType] | None = None) -> dict[str, Any]:
    """What there is to say of this environment.

    Returns:
        `nemo_war`: where it was found. `imports`: by module, null or why it cannot be imported.
        `drafter`: null, or why vLLM does not take ours. `contract`: what of `modules` does not hold.
        `versions`: see `versions.installed`.
    """
    from nemo_war.doctor.versions import installed

    importer = importer or importlib.import_module
    imports = {name: _complaint(lambda name=name: importer(name)) for name in MODULES}  # type: ignore[misc]
    return {
        "nemo_war": folder(),
        "imports": imports,
        "drafter": _complaint(_take_drafter),
        "contract": _contract(modules, importer),
        "versions": installed(),
    }


def folder() -> str:
    """Where nemo_war was found."""
    return str(Path(__file__).resolve().parents[2])


def _complaint(act: Callable[[], Any]) -> str | None:
    try:
        act()
    except Exception as error:  # an import runs whatever stands in the module
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


def _take_drafter() -> None:
    from vllm.config import SpeculativeConfig

    from nemo_war.generation.nemo_rl.engine_arguments import PROPOSER

    module, _, name = PROPOSER.rpartition(".")
    getattr(importlib.import_module(module), name)
    SpeculativeConfig(method="custom_class", model=PROPOSER, num_speculative_tokens=1)


def _contract(modules: Sequence[str], importer: Callable[[str], ModuleType]) -> list[str]:
    from nemo_war.generation.nemo_rl import contract

    def asked_for(name: str) -> ModuleType:
        if name not in modules:
            raise ModuleNotFoundError
        return importer(name)

    lines = [" ".join(line.split()) for line in contract.check(asked_for)]
    return [line for line in lines if line.partition(":")[0] in modules]


def main(modules: Sequence[str]) -> None:
    """Print the answer; whatever imports print goes to standard error."""
    out = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(out, "w") as file:
        json.dump(answer(modules), file)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1:])
