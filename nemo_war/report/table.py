"""The report on a terminal: did it help, why, at equal work?  One screen, from `summary.json` alone.

Sentences and cells are plain ASCII, so that they survive any terminal, pipe and locale;
colour only repeats what the words already say.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_war.telemetry.log import FILE_NAME

WIDTH = 100
MAX_LISTED = 3
"""Reasons, notes and damaged parts shown of each; `--json` has them all."""
FEW_REPEATS = 6
"""Below this many repeats even the widest interval of ratios covers the median in under 95 % of runs."""

LEGEND = "baseline: NeMo-RL's defaults.  sticky: those, with sticky routing.  war: WAR's routing and drafts."
LIVE_TITLE = "Live: every mode samples its own text, so the work differs and no speed-up follows from it"

Figures = Mapping[str, Any]
Row = tuple[str, Callable[[Figures], str]]


def print_report(summary: Figures, run: Path, console: Console) -> None:
    """Print the whole report.

    Args:
        summary: what `nemo_war.report.summary.summarize` returned.
        run: the folder the figures come from, named at the end.
        console: where to; it decides on colour and width.
    """
    if summary["modes"]:
        console.print(Text(_fixed_title(summary), style="bold"))
        console.print(_comparison(summary["modes"], FIXED_ROWS))
        console.print(Text(LEGEND))
        console.print()
    for line in answers(summary):
        console.print(line)
    console.print()
    if summary["live"]:
        console.print(Text(LIVE_TITLE, style="bold"))
        console.print(_comparison(summary["live"], LIVE_ROWS))
    for line in facts(summary):
        console.print(line)
    # A path is to be copied: the terminal may fold it, we must not.
    console.print(Text(_encodable(_files(run), console)), soft_wrap=True)
    for text in _troubles(summary):
        console.print(Text(_encodable(text, console), style="yellow"))


def _fixed_title(summary: Figures) -> str:
    if summary["invariants"]["ok"] is False:
        return "Fixed work, but NOT EQUAL work: no speed-up can be read from this table"
    repeats = max(figures["repeats"] for figures in summary["modes"].values())
    return f"Fixed work: all modes replay the same recorded work ({_count(repeats, 'repeat')}; median times)"


# --- the comparison ----------------------------------------------------------------------


def _comparison(modes: Mapping[str, Figures], rows: Sequence[Row]) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 2))
    table.add_column("", min_width=20)
    for mode in modes:
        table.add_column(Text(_printable(mode)), justify="right", min_width=12, no_wrap=True)
    for label, cell in rows:
        table.add_row(label, *(cell(figures) for figures in modes.values()))
    return table


def _cell(key: str, form: Callable[[Any], str]) -> Callable[[Figures], str]:
    return lambda figures: "-" if figures[key] is None else form(figures[key])


def _wasted(figures: Figures) -> str:
    if not figures["draft_tokens"]:
        return "-"
    wasted = figures["drafts_wasted"]
    return f"{_number(wasted)} ({_percent(wasted / figures['draft_tokens'])})"


def _number(value: float) -> str:
    """Whole numbers whole; means that are not whole keep one digit."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _percent(value: float) -> str:
    return f"{value:.0%}".replace("%", " %")


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 10 else f"{value:.2f} s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_RATE: Row = ("output tokens per second", _cell("output_tokens_per_s", "{:,.1f}".format))
_MAKESPAN: Row = ("makespan (rollouts, all steps)", _cell("makespan_s", _seconds))
_OUTPUT: Row = ("output tokens", _cell("output_tokens", _number))
_TURNS: Row = ("turns", _cell("turns", _number))
_HIT_RATE: Row = ("prefix cache hit rate", _cell("prefix_hit_rate", _percent))
_ACCEPTANCE: Row = ("acceptance length", _cell("acceptance_length", "{:.2f}".format))
_REWARD: Row = ("reward, mean", _cell("reward_mean", "{:.3f}".format))
_FAILURES: Row = ("truncations / errors", lambda f: f"{_number(f['truncations'])} / {_number(f['errors'])}")

FIXED_ROWS: tuple[Row, ...] = (
    _RATE,
    _MAKESPAN,
    _OUTPUT,
    _TURNS,
    ("prompt tokens computed", _cell("prefill_tokens", _number)),
    ("prompt tokens from cache", _cell("cached_tokens", _number)),
    _HIT_RATE,
    _ACCEPTANCE,
    ("draft tokens verified", _cell("draft_tokens", _number)),
    ("draft tokens wasted", _wasted),
    ("engine steps that speculate", _cell("share_of_steps_speculating", _percent)),
    _REWARD,
    _FAILURES,
)
LIVE_ROWS: tuple[Row, ...] = (_RATE, _MAKESPAN, _OUTPUT, _TURNS, _HIT_RATE, _ACCEPTANCE, _REWARD, _FAILURES)


# --- the answers -------------------------------------------------------------------------


def answers(summary: Figures) -> Iterator[Text]:
    """Did it help, why, at equal work: a sentence each, as far as the run can tell."""
    modes, equal = summary["modes"], summary["invariants"]
    yield _answer("Did it help?", *verdict(summary["speedup"], "the baseline", equal["ok"]))
    if "sticky" in modes and "war" in modes and equal["ok"]:
        yield _answer("Against sticky?", *verdict(summary["speedup_vs_sticky"], "sticky routing alone", True))
    measured = [s["makespan"] for s in (summary["speedup"], summary["speedup_vs_sticky"]) if s["makespan"]]
    if any(1 < figures["repeats"] < FEW_REPEATS for figures in measured):
        yield Text(f"Under {FEW_REPEATS} repeats, read an interval as a range, not as 95 % confidence.")
    if "baseline" in modes and "war" in modes and equal["ok"]:
        yield _answer("Why?", "", why(modes))
    if equal["ok"] is not None:
        yield from _equal_work(equal)


def _answer(question: str, style: str, sentence: str) -> Text:
    return Text.assemble((f"{question}  ", "bold"), (sentence, style))


def verdict(speedup: Figures, against: str, equal_work: bool | None) -> tuple[str, str]:
    """Style and sentence on one speed-up. A slower WAR is called slower."""
    figures = speedup["makespan"]
    if not figures:
        struck = "Speed-up struck out: the passes did not do equal work."
        return "yellow", struck if equal_work is False else f"Not measured: {speedup['reason']}."
    ratio, low, high = figures["ratio"], figures["low"], figures["high"]
    pace = f"{ratio:.2f} times as fast as {against}" if ratio >= 1 else _slower(ratio, against)
    if low is None:
        return "yellow", f"Not proven. WAR was {pace}, but in one repeat only, so there is no interval."
    spread = f"interval {low:.2f} to {high:.2f}, {_count(figures['repeats'], 'repeat')}"
    if low <= 1 <= high:
        return "yellow", f"Not proven. WAR was {pace}, but that may be chance ({spread})."
    word, style = ("Yes", "bold green") if low > 1 else ("No", "bold red")
    return style, f"{word}. WAR was {pace} ({spread})."


def _slower(ratio: float, against: str) -> str:
    return f"SLOWER than {against}: {ratio:.2f} times its speed"


def why(modes: Mapping[str, Figures]) -> str:
    """The two things WAR is to spend well, prefill and verification, beside what they cost."""
    baseline, war = modes["baseline"], modes["war"]
    computed, before = _number(war["prefill_tokens"]), _number(baseline["prefill_tokens"])
    prefill = f"Prefill: {computed} prompt tokens computed, baseline {before}."
    if war["acceptance_length"] is None:
        return f"{prefill} Drafts: none."
    share = war["share_of_steps_speculating"]
    return (
        f"{prefill} Drafts: {war['acceptance_length']:.2f} tokens per drafted request and engine step "
        f"(1 without), in {'an unknown share' if share is None else _percent(share)} of the steps; "
        f"{_wasted(war)} wasted; drafting itself took {_seconds(war['draft_seconds'])}."
    )


def _equal_work(invariants: Figures) -> Iterator[Text]:
    question = "At equal work?"
    if not invariants["ok"]:
        yield _answer(question, "bold red", "NO:")
        yield from (Text(f"  - {line}") for line in _first(invariants["reasons"]))
        return
    work = {name: _number(count) for name, count in invariants.items() if name not in ("ok", "reasons")}
    yield _answer(
        question,
        "",
        f"Yes, to the token. Every pass: {work['turns']} turns, {work['prompt_tokens']} prompt and "
        f"{work['output_tokens']} output tokens, {work['truncations']} truncations, {work['errors']} errors.",
    )


# --- the facts around it -----------------------------------------------------------------


def facts(summary: Figures) -> Iterator[Text]:
    """One line each on refits, history and the in-job comparison."""
    yield _refits(summary["refits"])
    if history := summary["history"]:
        epochs = _count(history["epochs"], "policy epoch")
        yield Text(
            f"History: {_number(history['tokens'])} tokens from {epochs} on the fullest replica at the end"
        )
    if ab := summary["ab"]:
        on, off = (_RATE[1](ab[side]) for side in ("on", "off"))
        yield Text(
            f"In-job A/B (different text, no claim): {on} output tokens/s with WAR on, {off} with it off"
        )
    if resumed := summary["resumed"]:
        before = _count(resumed["steps_before"], "step")
        yield Text(f"Resumed after {before} that an earlier process did; the figures are of this one's steps")
    if errors := sum(figures["draft_errors"] for figures in summary["modes"].values()):
        yield Text(
            f"Drafting failed {_number(errors)} times a pass; plain decoding took over", style="yellow"
        )
    if failed := sum(figures["exchange_failures"] for figures in summary["modes"].values()):
        yield Text(
            f"History was not told to every replica {_number(failed)} times a pass; it came again later",
            style="yellow",
        )


def _refits(refits: Sequence[Figures]) -> Text:
    if not refits:
        return Text("Refits: none")
    seconds = [refit["seconds"] or 0.0 for refit in refits]
    spent = f"median {_seconds(statistics.median(seconds))}, longest {_seconds(max(seconds))}"
    begin = f"Refits: {len(refits)}, {spent}; prefix cache reset confirmed by every replica: "
    stale = [refit for refit in refits if not refit["kv_reset_ok"]]
    if not stale:
        return Text(begin + "yes")
    first = f"{_printable(stale[0]['mode'])} {_printable(stale[0]['phase'])}, epoch {stale[0]['epoch']}"
    return Text(f"{begin}NO, not in {len(stale)} (first: {first})", style="bold red")


def _files(run: Path) -> str:
    folder = run if run.is_dir() else run.parent
    summary = (
        ", summary.json (these figures; keys: docs/summary.md)" if (folder / "summary.json").exists() else ""
    )
    return f"Files: {folder}/{FILE_NAME} (every record){summary}"


def _troubles(summary: Figures) -> Iterator[str]:
    if not summary["modes"] and not summary["live"]:
        yield "The log holds no finished step: there is nothing to compare."
    for line in _first(summary["notes"]):
        yield f"Note: {line}"
    if summary["damage"]:
        yield "Parts of the log could not be read; the figures above are without them:"
    for line in _first(summary["damage"]):
        yield f"  - {line}"


def _first(lines: Sequence[str]) -> Iterator[str]:
    yield from (_printable(line) for line in lines[:MAX_LISTED])
    if len(lines) > MAX_LISTED:
        yield f"and {len(lines) - MAX_LISTED} more (--json lists them)"


def _printable(text: str) -> str:
    """Names come from a file: no control character of theirs reaches the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _encodable(text: str, console: Console) -> str:
    return text.encode(console.encoding, "replace").decode(console.encoding)
