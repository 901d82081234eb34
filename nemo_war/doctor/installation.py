"""NeMo-RL in this process: is it there, which release is it, and does it have what WAR takes hold of?"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from nemo_war.config import SpeculativeConfig, WarConfig
from nemo_war.doctor import probe
from nemo_war.doctor.finding import Finding, fail, note, ok
from nemo_war.doctor.remedy import remedy
from nemo_war.errors import ConfigError
from nemo_war.generation.nemo_rl import contract

_START = (
    "in NeMo-RL's checkout: uv run python -m nemo_war.cli doctor; or, with a Python that has all that "
    "NeMo-RL needs: export PYTHONPATH=$NEMO_RL_PATH"
)
_NO_IMPORT = ": cannot be imported: "
_UPDATE = "update NeMo-RL to main of 22 August 2026 (7ea279ab) or later"


class Release(StrEnum):
    """What WAR can do with a NeMo-RL."""

    FULL = "main of 7ea279ab or later: supported in full"
    NO_DRAFTS = "0.7: placement and refits; drafts are refused, as its vLLM takes no drafter by its class"
    REFUSED = "older than 0.7: refused"


def absent() -> Finding | None:
    """Why NeMo-RL cannot be imported here; None where it can."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            importlib.import_module("nemo_rl")
        except ModuleNotFoundError as error:
            if error.name == "nemo_rl":
                return fail("nemo_rl", f"not importable by {sys.executable}", _START)
            return _broken(error)
        except Exception as error:  # an import runs whatever stands in the module
            return _broken(error)
    return None


def complaints() -> list[str]:
    """What of the contract does not hold here, a line for each fact or module."""
    with contextlib.redirect_stdout(sys.stderr):
        return [" ".join(line.split()) for line in contract.check(importlib.import_module)]


def refusal(war: WarConfig) -> ConfigError | None:
    """What this NeMo-RL cannot do of what the block wants, as a job would say it at its start."""
    from nemo_war.generation.nemo_rl.release import check

    try:
        check(war)
    except ConfigError as error:
        return error
    return None


def release() -> Release:
    """Which NeMo-RL this is; `absent` must have found it.

    Raises:
        ImportError: its generation cannot be imported.
    """
    for drafting, found in ((True, Release.FULL), (False, Release.NO_DRAFTS)):
        if refusal(WarConfig(speculative=SpeculativeConfig(enabled=drafting))) is None:
            return found
    return Release.REFUSED


def judge_release() -> Finding:
    """Whether this NeMo-RL is one that WAR runs with."""
    import nemo_rl

    where = f"nemo_rl in {Path(nemo_rl.__file__).parent}"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = release()
    except Exception as error:
        return fail("release", f"{where}: {_said(error)}", remedy("", str(error)))
    if found is Release.REFUSED:
        return fail("release", f"{where}: {found}", _UPDATE, release=found.name)
    if found is Release.NO_DRAFTS:
        return note("release", f"{where}: {found}", _UPDATE, release=found.name)
    return ok("release", f"{where}: {found}", release=found.name)


def judge_ours() -> Finding:
    """Whether what WAR has in the driver can be imported here."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            importlib.import_module("nemo_war.generation.nemo_rl.seams")
    except Exception as error:
        return fail("nemo_war", f"cannot be imported here: {_said(error)}", remedy("", str(error)))
    return ok("nemo_war", f"found in {probe.folder()}, and can be imported here")


def for_workers(lines: list[str]) -> list[str]:
    """Modules that cannot be imported here for want of vLLM, which the driver's environment need not have."""
    return [module_of(line) for line in lines if "vllm" in line.partition(_NO_IMPORT)[2].lower()]


def judge_seams(here: list[str], there: list[str] | None, release: str | None) -> Iterator[Finding]:
    """Whether all is there that WAR relies on.

    Args:
        here: the contract's lines in the driver's environment.
        there: those in the workers', of the modules that are for them; None where nobody could be asked.
        release: name of the `Release` that this NeMo-RL is; None where that is not known.
    """
    theirs = for_workers(here)
    lines = [line for line in here if module_of(line) not in theirs] + list(there or ())
    if theirs and there is None:
        yield note(
            "seams",
            f"not looked at, as they need vLLM: {', '.join(theirs)}",
            "try again once NeMo-RL has made an environment for its vLLM workers",
            not_looked_at=theirs,
        )
    if lines and release != Release.FULL.name:
        why = "and the release is not known" if release is None else "as is to be expected of another release"
        what = f"{len(lines)} of {len(contract.FACTS)} facts, read at {contract.COMMIT}, are not so here"
        yield note("seams", f"{what}, {why}", differing=lines)
        return
    for line in lines:
        yield fail("seams", line, _mend(line))
    if not lines:
        left_out = theirs if there is None else []
        count = sum(fact.module not in left_out for fact in contract.FACTS)
        yield ok(
            "seams", f"all {count} names that WAR relies on are there, and as they should be", names=count
        )


def module_of(line: str) -> str:
    """The module that a line of the contract is about."""
    return line.partition(":")[0]


def _mend(line: str) -> str:
    if _NO_IMPORT in line:
        return remedy("", line.partition(_NO_IMPORT)[2])
    return f"use NeMo-RL at {contract.COMMIT}; a later one that lacks this needs a WAR that knows it"


def _broken(error: Exception) -> Finding:
    return fail("nemo_rl", f"its import fails: {_said(error)}", "mend that first: it fails without WAR, too")


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
