"""What the doctor found: something that is well, worth knowing, or to be mended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from nemo_war.errors import ConfigError


class State(StrEnum):
    """How it is."""

    OK = "ok"
    NOTE = "note"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; made by `ok`, `note` or `fail`.

    Attributes:
        state: how it is.
        about: what it is about, in a word or two.
        says: what was found.
        fix: what to do; every failure has one.
        facts: the same for programs.
    """

    state: State
    about: str
    says: str
    fix: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class Section(NamedTuple):
    """Findings under a title."""

    title: str
    findings: Sequence[Finding]


def ok(about: str, says: str, **facts: Any) -> Finding:
    """It is well."""
    return Finding(State.OK, about, says, facts=facts)


def note(about: str, says: str, fix: str | None = None, **facts: Any) -> Finding:
    """It works, or may work, and is worth knowing."""
    return Finding(State.NOTE, about, says, fix, facts)


def fail(about: str, says: str, fix: str, **facts: Any) -> Finding:
    """It will not work."""
    return Finding(State.FAIL, about, says, fix, facts)


def refused(about: str, error: ConfigError) -> Finding:
    """A value that a job would refuse at its start, in the same words."""
    return fail(about, str(error).removesuffix(f"; {error.fix}"), error.fix)
