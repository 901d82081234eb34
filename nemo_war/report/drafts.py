"""`nemo-war replay-drafts`: what drafting would have been worth on recorded trajectories."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_war.errors import UserError
from nemo_war.speculative.history import warm_up
from nemo_war.speculative.replay import COSTS, THRESHOLDS, Replay, Replayed, goodput
from nemo_war.speculative.workload import Recorded
from nemo_war.telemetry.progress import progress

SHOWN_COST = 0.02
"""Price of a draft token, in steps, for the tables by epoch and position: a few dozen running requests."""
SHOWN_POSITIONS = 16
MAX_TOKENS = 8_000_000
"""History of a replay at most, 200 MB; the pages of trajectories are rounded up within it."""

Figures = dict[str, Any]


def replay_drafts(
    recorded: Sequence[Recorded], *, max_draft_tokens: int, as_json: bool, plot: Path | None
) -> int:
    """Replay, print and plot.

    Args:
        recorded: trajectories, in the order they were sampled in.
        max_draft_tokens: longest draft.
        as_json: print the figures instead of tables.
        plot: image to write; its suffix says of which kind.

    Returns:
        The exit status.

    Raises:
        UserError: there is no response to replay, or the plot cannot be written.
    """
    if plot is not None:
        _figure_class()  # now, not after a minute of work
    figures = measure(recorded, max_draft_tokens)
    if as_json:
        json.dump(figures, sys.stdout)
        print()
    else:
        print_figures(figures, Console(width=None if sys.stdout.isatty() else 100))
    if plot is not None:
        draw(figures, plot)
    return 0


def measure(recorded: Sequence[Recorded], max_draft_tokens: int) -> Figures:
    """Replay at every price, and without history at one.

    Returns:
        `trajectories`, `response_tokens`; `cost_curve`: for each cost of a draft token in steps the
        best threshold, its `goodput` (tokens per step's time; 1 without drafts), `tokens_per_step` and
        `draft_tokens_per_step`; at `cost`: `epochs` with `tokens_per_step`, `acceptance` (share of draft
        tokens accepted) and `tokens_per_step_own` (from the own trajectory only), `positions` (`verified`
        draft tokens at each place of a draft whose predecessors were accepted, `accepted` of them) and
        `reliability` ([mean predicted, observed acceptance, draft tokens] by decile).

    Raises:
        UserError: there is no response to replay.
    """
    if not any(len(response) > 1 for each in recorded for _, response in each.turns):
        raise UserError("no response of two tokens or more in these traces; name others")
    warm_up()
    lengths = [sum(len(prompt) + len(response) for prompt, response in each.turns) for each in recorded]
    done: dict[float, list[Replayed]] = {}
    reliability: dict[float, list[tuple[float, float, int]]] = {}
    with progress("replaying drafts", total=len(recorded) * (len(THRESHOLDS) + 1)) as bar:
        for threshold in THRESHOLDS:
            replay = Replay(threshold, max_draft_tokens, max_tokens=min(sum(lengths), MAX_TOKENS))
            done[threshold] = replay.run(recorded, bar.advance)
            reliability[threshold] = replay.history.reliability()
        curve = [_at_cost(done, cost) for cost in COSTS]
        shown = curve[COSTS.index(SHOWN_COST)]["threshold"]
        alone = Replay(shown, max_draft_tokens, max_tokens=max(lengths), keep_history=False)
        own = alone.run(recorded, bar.advance)
    return {
        "trajectories": len(recorded),
        "response_tokens": sum(len(response) for each in recorded for _, response in each.turns),
        "max_draft_tokens": max_draft_tokens,
        "cost_curve": curve,
        "cost": SHOWN_COST,
        "epochs": _by_epoch(done[shown], own),
        "positions": _by_position(done[shown]),
        "reliability": reliability[shown],
    }


def _total(replayed: Iterable[Replayed]) -> tuple[int, int, int]:
    """Steps, draft tokens and committed tokens."""
    rows = [(each.steps, each.drafted, each.tokens) for each in replayed]
    return tuple(map(sum, zip(*rows, strict=True))) if rows else (0, 0, 0)  # type: ignore[return-value]


def _at_cost(done: dict[float, list[Replayed]], cost: float) -> Figures:
    totals = {threshold: _total(replayed) for threshold, replayed in done.items()}
    best = max(totals, key=lambda threshold: goodput(*totals[threshold], cost))
    steps, drafted, tokens = totals[best]
    return {
        "cost": cost,
        "threshold": best,
        "goodput": round(goodput(*totals[best], cost), 4),
        "tokens_per_step": round(tokens / steps, 4),
        "draft_tokens_per_step": round(drafted / steps, 4),
    }


def _by_epoch(replayed: list[Replayed], own: list[Replayed]) -> list[Figures]:
    rows = []
    for epoch in sorted({each.epoch for each in replayed}):
        steps, drafted, tokens = _total(each for each in replayed if each.epoch == epoch)
        own_steps, _, _ = _total(each for each in own if each.epoch == epoch)
        accepted = sum(int(each.accepted.sum()) for each in replayed if each.epoch == epoch)
        rows.append(
            {
                "epoch": epoch,
                "tokens": tokens,
                "tokens_per_step": round(tokens / steps, 4) if steps else None,
                "tokens_per_step_own": round(tokens / own_steps, 4) if own_steps else None,
                "acceptance": round(accepted / drafted, 4) if drafted else None,
            }
        )
    return rows


def _by_position(replayed: list[Replayed]) -> list[Figures]:
    verified = np.sum([each.verified for each in replayed], axis=0)
    accepted = np.sum([each.accepted for each in replayed], axis=0)
    return [
        {"position": place + 1, "verified": int(n), "accepted": int(hits)}
        for place, (n, hits) in enumerate(zip(verified, accepted, strict=True))
        if n
    ]


def print_figures(figures: Figures, console: Console) -> None:
    """Three tables, for a person."""
    console.print(
        f"{figures['trajectories']} trajectories, {figures['response_tokens']} response tokens, "
        f"drafts of at most {figures['max_draft_tokens']} tokens"
    )
    _print(
        console,
        "What drafting is worth, by the cost of a draft token (in steps; it rises with load)",
        ("cost", "goodput vs no drafts", "tokens per step", "draft tokens per step", "least survival"),
        [
            (
                f"{row['cost']:g}", f"{row['goodput']:.2f}x", f"{row['tokens_per_step']:.2f}",
                f"{row['draft_tokens_per_step']:.1f}", f"{row['threshold']:.2f}",
            )
            for row in figures["cost_curve"]
        ],
    )  # fmt: skip
    _print(
        console,
        f"By policy epoch, at cost {figures['cost']:g}",
        ("epoch", "tokens", "tokens per step", "... own text only", "draft tokens accepted"),
        [
            (
                str(row["epoch"]), str(row["tokens"]), _number(row["tokens_per_step"]),
                _number(row["tokens_per_step_own"]),
                "-" if row["acceptance"] is None else f"{row['acceptance']:.0%}",
            )
            for row in figures["epochs"]
        ],
    )  # fmt: skip
    positions = figures["positions"]
    _print(
        console,
        f"By position in the draft, at cost {figures['cost']:g}"
        + (f" (first {SHOWN_POSITIONS} of {len(positions)})" if len(positions) > SHOWN_POSITIONS else ""),
        ("position", "reached", "accepted"),
        [
            (str(row["position"]), str(row["verified"]), f"{row['accepted'] / row['verified']:.0%}")
            for row in positions[:SHOWN_POSITIONS]
        ],
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _print(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(Text(title, style="bold"))  # a table's own title is folded to the table's width
    console.print(table)


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install nemo-war[plot], or leave --plot out") from None
    return Figure


def draw(figures: Figures, path: Path) -> None:
    """Write the cost curve, tokens per step by epoch, and reliability as one image.

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    figure = _figure_class()(figsize=(12, 3.6), layout="constrained")
    costs, epochs, reliability = figure.subplots(1, 3)
    curve, rows = figures["cost_curve"], figures["epochs"]
    costs.plot([row["cost"] for row in curve], [row["goodput"] for row in curve], marker="o")
    costs.axhline(1, color="grey", linestyle=":")
    costs.set(xscale="log", xlabel="cost of a draft token (steps)", ylabel="goodput vs no drafts")
    numbers = [row["epoch"] for row in rows]
    for key, label in (("tokens_per_step", "all history"), ("tokens_per_step_own", "own text only")):
        epochs.plot(numbers, [row[key] for row in rows], marker="o", label=label)
    epochs.set(xlabel="policy epoch", ylabel="tokens per step", xticks=numbers)
    epochs.legend()
    reliability.plot([0, 1], [0, 1], color="grey", linestyle=":")
    reliability.plot(*zip(*((p, seen) for p, seen, _ in figures["reliability"]), strict=True), marker="o")
    reliability.set(xlabel="predicted acceptance", ylabel="observed")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--plot {path}: {error}; name a .png, .svg or .pdf in a folder that exists"
        ) from None
