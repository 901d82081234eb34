"""How the findings are shown: lines for a person, one JSON object for a program."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from nemo_war import __version__
from nemo_war.doctor.finding import Finding, Section, State

_WIDTH = 110
_INDENT = 8
_STYLES = {State.OK: "green", State.NOTE: "yellow", State.FAIL: "bold red"}
"""Colour repeats what the words say."""


@dataclass(frozen=True, slots=True)
class Report:
    """All that was found.

    Attributes:
        sections: what it is about, in the order it is read in.
        recipe: title of the section that is about a recipe; None where none was named.
    """

    sections: Sequence[Section]
    recipe: str | None = None

    @property
    def failures(self) -> int:
        """Findings that are to be mended."""
        return sum(finding.state is State.FAIL for _, findings in self.sections for finding in findings)


def to_json(report: Report) -> str:
    """One object; docs/guides/install-on-a-cluster.md says what its keys mean."""
    recipe = [section for section in report.sections if section.title == report.recipe]
    return json.dumps(
        {
            "schema": 1,
            "nemo_war": __version__,
            "ok": not report.failures,
            "failures": report.failures,
            "sections": [
                {"title": title, "findings": [_plain(each) for each in findings]}
                for title, findings in report.sections
            ],
            "plan": {key: value for each in recipe[0].findings for key, value in each.facts.items()}
            if recipe
            else None,
        },
        indent=2,
    )


def show(report: Report, console: Console) -> None:
    """Print lines: how it is, what it is about, what was found; below it what to do."""
    for title, findings in report.sections:
        console.print(Text(title, style="bold"), soft_wrap=True)
        for finding in findings:
            for line in _lines(finding):
                console.print(line, soft_wrap=True)
        console.print()
    console.print(_verdict(report.failures))


def _lines(finding: Finding) -> Iterator[Text]:
    said = textwrap.wrap(
        f"{finding.about}: {finding.says}", _WIDTH - _INDENT, break_long_words=False, break_on_hyphens=False
    )
    yield Text.assemble("  ", (f"{finding.state:<{_INDENT - 2}}", _STYLES[finding.state]), said[0])
    for line in said[1:]:
        yield Text(" " * _INDENT + line)
    if finding.fix:  # on one line, as it may be copied
        yield Text(f"{' ' * _INDENT}-> {finding.fix}")


def _plain(finding: Finding) -> Mapping[str, Any]:
    return {
        "state": finding.state.lower(),
        "about": finding.about,
        "says": finding.says,
        "fix": finding.fix,
        "facts": dict(finding.facts),
    }


def _verdict(failures: int) -> Text:
    if not failures:
        return Text("Nothing to mend.", style="bold green")
    return Text(f"To mend: {failures}.", style="bold red")
