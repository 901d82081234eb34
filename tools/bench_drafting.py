"""Our suffix history and the stock suffix tree (arctic-inference) side by side, on the CPU.

    python tools/bench_drafting.py TRACE... [--tokenizer DIR] [--history-tokens 8000000] [--sharing]

Prints tables, then one line of JSON:

* `goodput_ratio`: {trace: {c: ours / stock}} with goodput A / (1 + c D), A tokens and D draft
  tokens per step; both sides tuned on one half of the groups and measured on the other,
  the mean of both directions;
* `acceptance`: {trace: {ours, stock, ours_without_history: [tokens per step of each attempt]}},
  each at the setting tuned for c = 0.02;
* `draft_us`: {ours, stock: {p50, p99}} per request in a step of 32, taking in what was sampled included;
* `turn_start_ms_32k`, `bytes_per_token`: {ours, stock}; `ingest_us_per_token`, `evict_us` (per
  trajectory): ours.

With `--sharing`, what it is worth that replicas tell each other of their histories instead of all that:

* `sharing`: {trace: {siblings: {own, step, live, one: {goodput: {c: tokens per step's time},
  tokens_per_step}}}}. The attempts at a task are spread over four replicas: so many siblings in a step, the
  others in later ones. `own`: each replica has its own history; `step`: told at the end of a step; `live`:
  after each turn as well; `one`: a single history for all, which even holds the siblings' turns of the same
  time, as they are replayed one after the other, and so is more than telling could bring. Each at
  its best price for each c; tokens per step at that for c = 0.02.

Times are CPU time of the thread, so that neighbours on a shared machine do not count; the stock
tree of the last two lines has vLLM's default depth.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from nemo_war.config import ExchangeConfig
from nemo_war.errors import UserError
from nemo_war.generation.embedded.encoder import encoder
from nemo_war.speculative.exchange import Batch, Exchange
from nemo_war.speculative.history import SuffixHistory, warm_up
from nemo_war.speculative.replay import COSTS, THRESHOLDS, Replay, accepted_length, goodput
from nemo_war.speculative.workload import Recorded, read_trace, synthetic_texts

DEPTHS = (24, 64)  # vLLM's default, and arctic-inference's own
FACTORS = (1.0, 2.0, 4.0)
FLOORS = (0.05, 0.1, 0.2, 0.35, 0.5)
CAPS = (8, 16, 64)
BATCH = 32
LONG = 32_768
REPLICAS = 4
GROUPS_PER_STEP = 7
SIBLINGS = (4, 2, 1)
PRICES = (0.02, 0.05, 0.12, 0.25)

# {(group, epoch): float64[3] of steps, draft tokens, tokens}
Totals = dict[tuple[str, int], np.ndarray]


def replay_ours(recorded: list[Recorded], threshold: float, history_kept: bool = True) -> Totals:
    """Replay with drafts of up to 64 tokens, each as far as its survival reaches the threshold."""
    totals: Totals = defaultdict(lambda: np.zeros(3))
    for each in Replay(threshold, max_draft=64, keep_history=history_kept).run(recorded):
        totals[each.group, each.epoch] += (each.steps, each.drafted, each.tokens)
    return dict(totals)


def draft_everywhere(recorded: list[Recorded], depth: int) -> tuple[np.ndarray, list[tuple[str, int, int]]]:
    """The stock tree's drafts at every place and setting.

    What the tree holds at a place does not depend on which places were drafted at before,
    so that one pass serves all settings.

    Returns:
        int16[places, settings, 2] drafted and accepted tokens; (group, epoch, places) of each response.
    """
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    tree = SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=10_000)
    places, responses = [], []
    for each in recorded:
        text = np.zeros(0, np.int32)
        for turn, (prompt, response) in enumerate(each.turns):
            name = (each.trajectory, turn)
            text = np.concatenate([text, prompt, response])
            start = len(text) - len(response)
            tree.start_request(name, text[:start])
            for at in range(1, len(response)):
                tree.add_active_response(name, response[at - 1 : at])
                context, rest = text[max(0, start + at - depth) : start + at], response[at:]
                row = []
                for factor, floor in product(FACTORS, FLOORS):
                    draft = tree.speculate(
                        name, context, max_spec_tokens=depth, max_spec_factor=factor, min_token_prob=floor
                    ).token_ids
                    row.append((len(draft), accepted_length(np.array(draft, np.int32), rest)))
                places.append(row)
            tree.add_active_response(name, response[-1:])
            tree.stop_request(name)
            responses.append((each.group, each.epoch, len(response) - 1))
    return np.array(places, np.int16), responses


def walk_stock(drafts: np.ndarray, responses: list[tuple[str, int, int]], cap: int) -> Totals:
    """The steps of one setting through int16[places, 2], drafts cut at `cap` tokens."""
    totals: Totals = defaultdict(lambda: np.zeros(3))
    start = 0
    for group, epoch, size in responses:
        at, steps, drafted = 0, 0, 0
        while at < size:
            length = min(int(drafts[start + at, 0]), cap)
            steps, drafted = steps + 1, drafted + length
            at += min(int(drafts[start + at, 1]), length) + 1
        totals[group, epoch] += (steps, drafted, size)
        start += size
    return dict(totals)


def replay_stock(recorded: list[Recorded]) -> dict[tuple[float, ...], Totals]:
    """Totals of every setting (depth, factor, floor, cap)."""
    settings = {}
    for depth in DEPTHS:
        drafts, responses = draft_everywhere(recorded, depth)
        for index, (factor, floor) in enumerate(product(FACTORS, FLOORS)):
            for cap in CAPS:
                settings[depth, factor, floor, cap] = walk_stock(drafts[:, index], responses, cap)
    return settings


def summed(totals: Totals, half: set[str] | None = None) -> np.ndarray:
    return sum((value for (group, _), value in totals.items() if half is None or group in half), np.zeros(3))


def tuned(settings: dict[Any, Totals], cost: float, half: set[str] | None = None) -> Any:
    """The setting that is best on one half of the groups (None: on all)."""
    return max(settings, key=lambda key: goodput(*summed(settings[key], half), cost))


def compare(name: str, recorded: list[Recorded]) -> dict[str, Any]:
    """Goodput and acceptance on one trace, as a table and for the JSON line."""
    groups = sorted({each.group for each in recorded})
    halves = set(groups[0::2]), set(groups[1::2])
    ours = {threshold: replay_ours(recorded, threshold) for threshold in THRESHOLDS}
    stock = replay_stock(recorded)
    print(f"\n{name}: {len(recorded)} trajectories, {int(summed(ours[0.02])[2])} response tokens")
    print(f"{'c':>6} {'ours':>7} {'stock':>7} {'ratio':>7}  settings tuned on the one half")
    ratios = {}
    for cost in COSTS:
        pairs = []
        for train, test in (halves, halves[::-1]):
            keys = tuned(ours, cost, train), tuned(stock, cost, train)
            pairs.append(
                (goodput(*summed(ours[keys[0]], test), cost), goodput(*summed(stock[keys[1]], test), cost))
            )
        mine, theirs = np.mean(pairs, axis=0)
        ratios[str(cost)] = round(float(np.mean([a / b for a, b in pairs])), 4)
        print(f"{cost:>6} {mine:>7.3f} {theirs:>7.3f} {ratios[str(cost)]:>7.3f}  {keys[0]} | {keys[1]}")
    threshold, setting = tuned(ours, 0.02), tuned(stock, 0.02)
    acceptance = {
        "ours": by_epoch(ours[threshold]),
        "stock": by_epoch(stock[setting]),
        "ours_without_history": by_epoch(replay_ours(recorded, threshold, history_kept=False)),
    }
    for side, values in acceptance.items():
        print(f"tokens per step by attempt, {side}: {values}")
    return {"goodput_ratio": ratios, "acceptance": acceptance, "threshold": threshold, "setting": setting}


def by_epoch(totals: Totals) -> list[float]:
    sums: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(3))
    for (_, epoch), value in totals.items():
        sums[epoch] += value
    return [round(float(sums[epoch][2] / sums[epoch][0]), 3) for epoch in sorted(sums)]


def resident() -> int:
    """Bytes of memory this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Per request, from the times of whole steps."""
    p50, p99 = np.percentile(np.array(seconds) / BATCH * 1e6, [50, 99])
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2)}


def median_ms(action: Callable[[int], Any], repeats: int = 5) -> float:
    """Median time of `action(i)` in milliseconds."""
    times = []
    for index in range(repeats):
        started = time.thread_time()
        action(index)
        times.append((time.thread_time() - started) * 1e3)
    return round(float(np.median(times)), 4)


def make_texts(tokens: int) -> tuple[list[tuple[str, np.ndarray]], np.ndarray]:
    """Trajectories of `tokens` tokens in all with BATCH more to run live, and one long context."""
    source = synthetic_texts(seed=0)
    texts = [next(source) for _ in range(tokens // 2000 + BATCH)]
    return texts, np.concatenate([text for _, text in texts])[:LONG]


def time_ours(texts: list[tuple[str, np.ndarray]], long: np.ndarray, steps: int) -> dict[str, Any]:
    stored, live = texts[:-BATCH], texts[-BATCH:]
    history = SuffixHistory(max_tokens=len(stored) * 2000 + LONG * 4, max_draft=24)
    started = time.thread_time()
    for number, (group, text) in enumerate(stored):
        history.end(history.begin(f"t{number}", group, 0, text))
    ingest = (time.thread_time() - started) / history.stats().tokens * 1e6
    slots = np.array(
        [history.begin(f"l{i}", group, 0, text[:100]) for i, (group, text) in enumerate(live)], np.int32
    )
    at, times = np.full(BATCH, 100), []
    counts, budgets = np.ones(BATCH, np.int32), np.full(BATCH, 24, np.int32)
    block = np.zeros((BATCH, 25), np.int32)
    for _ in range(steps):
        for row, (_, text) in enumerate(live):
            at[row] = at[row] if at[row] + 25 < len(text) else 100
            block[row] = text[at[row] : at[row] + 25]
        started = time.thread_time()
        history.extend(slots, block, counts)
        drafts = history.draft(slots, budgets, 0)
        times.append(time.thread_time() - started)
        at += counts
        for row, (_, text) in enumerate(live):
            right = accepted_length(drafts.tokens[row, : drafts.lengths[row]], text[at[row] :])
            counts[row] = min(right + 1, 25)
    history.end(history.begin("long", "long", 0, long[:-200]))
    turn = median_ms(lambda _: history.end(history.begin("long", "long", 0, long)), repeats=1)
    evict = median_ms(lambda index: history.cut(f"t{index * (len(stored) // 21)}", 0), repeats=21) * 1e3
    bytes_each = history.stats().bytes / (len(stored) * 2000 + LONG * 4)
    return {
        "draft": percentiles(times), "turn": turn, "bytes": round(bytes_each, 1),
        "ingest": round(ingest, 3), "evict": round(evict, 1),
    }  # fmt: skip


def time_stock(
    texts: list[tuple[str, np.ndarray]], long: np.ndarray, steps: int, setting: tuple[float, ...]
) -> dict[str, Any]:
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    stored, live, depth = texts[:-BATCH], texts[-BATCH:], DEPTHS[0]
    before = resident()
    tree = SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=len(texts) + 100)
    for number, (_, text) in enumerate(stored):
        tree.start_request(number, np.zeros(1, np.int32))
        tree.add_active_response(number, text)
        tree.stop_request(number)
    bytes_each = (resident() - before) / (len(stored) * 2000)
    for row, (_, text) in enumerate(live):
        tree.start_request(f"l{row}", text[:100])
    at, counts, times = np.full(BATCH, 100), np.ones(BATCH, int), []
    _, factor, floor, _ = setting
    for _ in range(steps):
        for row, (_, text) in enumerate(live):
            at[row] = at[row] if at[row] + 25 < len(text) else 100
        spent = 0.0
        for row, (_, text) in enumerate(live):
            fresh, end = text[at[row] : at[row] + counts[row]], at[row] + counts[row]
            context = text[max(0, end - depth) : end]
            started = time.thread_time()
            tree.add_active_response(f"l{row}", fresh)
            draft = tree.speculate(
                f"l{row}", context, max_spec_tokens=24, max_spec_factor=factor, min_token_prob=floor
            ).token_ids
            spent += time.thread_time() - started
            at[row] = end
            counts[row] = min(accepted_length(np.array(draft, np.int32), text[end:]) + 1, 25)
        times.append(spent)
    turn = median_ms(lambda index: tree.start_request(f"long{index}", long), repeats=3)
    evict = median_ms(lambda index: tree.evict_cached_response(index * (len(stored) // 5)), repeats=5)
    return {
        "draft": percentiles(times),
        "turn": turn,
        "bytes": round(bytes_each, 1),
        "evict": round(evict * 1e3, 1),
    }


def compare_speed(tokens: int, steps: int, setting: tuple[float, ...]) -> dict[str, Any]:
    """Times and memory with a full history."""
    texts, long = make_texts(tokens)
    ours = time_ours(texts, long, steps)
    stock = time_stock(texts, long, steps, setting)
    print(f"\n{tokens} tokens of history, steps of {BATCH} requests")
    print(f" ours: {ours}\nstock: {stock}")
    return {
        "draft_us": {"ours": ours["draft"], "stock": stock["draft"]},
        "turn_start_ms_32k": {"ours": ours["turn"], "stock": stock["turn"]},
        "bytes_per_token": {"ours": ours["bytes"], "stock": stock["bytes"]},
        "ingest_us_per_token": ours["ingest"],
        "evict_us": ours["evict"],
    }


def compare_sharing(name: str, recorded: list[Recorded]) -> dict[str, Any]:
    """Goodput and tokens per step for each way to share, as a table and for the JSON line."""
    print(
        f"\n{name}: what {REPLICAS} replicas gain by telling each other, {GROUPS_PER_STEP} groups in a step"
    )
    columns = " ".join(f"{f'c={cost}':>7}" for cost in COSTS)
    print(f"{'siblings':>8} {'history':>8} {'tok/step':>9} {columns}")
    result: dict[str, Any] = {}
    for siblings in SIBLINGS:
        result[str(siblings)] = {}
        for sharing in ("own", "step", "live", "one"):
            totals = {price: replay_fleet(recorded, siblings, sharing, price) for price in PRICES}
            best = {cost: max(PRICES, key=lambda price: goodput(*totals[price], cost)) for cost in COSTS}
            goodputs = {str(cost): round(goodput(*totals[best[cost]], cost), 4) for cost in COSTS}
            steps, _, tokens = totals[best[0.02]]
            result[str(siblings)][sharing] = {
                "goodput": goodputs,
                "tokens_per_step": round(float(tokens / steps), 4),
            }
            row = " ".join(f"{value:>7.3f}" for value in goodputs.values())
            print(f"{siblings:>8} {sharing:>8} {tokens / steps:>9.3f} {row}", flush=True)
    return result


def replay_fleet(recorded: list[Recorded], siblings: int, sharing: str, price: float) -> np.ndarray:
    """Replay on several replicas at a time, turn by turn.

    Returns:
        float64[3] of steps, draft tokens, tokens.
    """
    count = 1 if sharing == "one" else REPLICAS
    replicas = [Replay(price, max_draft=64, max_tokens=2_000_000) for _ in range(count)]
    exchange = Exchange(range(count), max_batch_tokens=ExchangeConfig().max_tokens_per_batch)
    totals = np.zeros(3)
    for step, placed in enumerate(in_steps(recorded, siblings)):
        for replica in replicas:
            replica.history.advance_epoch(step)
        running = [(place % count, replace(each, epoch=step)) for place, each in placed]
        contexts = {each.trajectory: np.zeros(0, np.int32) for _, each in running}
        for place, each in running:
            exchange.placed(each.trajectory, each.group, place)
        for turn in range(max(len(each.turns) for _, each in running)):
            for place, each in running:
                if turn < len(each.turns):
                    prompt, response = each.turns[turn]
                    context = np.concatenate([contexts[each.trajectory], prompt])
                    done = replicas[place].turn(each, context, response)
                    totals += (done.steps, done.drafted, done.tokens)
                    text = contexts[each.trajectory] = np.concatenate([context, response])
                    exchange.finished(each.trajectory, each.group, place, len(text))
                    if turn == len(each.turns) - 1:
                        exchange.ended(each.trajectory, len(text))
            if sharing == "live":
                tell(replicas, exchange, exchange.live())
        if sharing in ("step", "live"):
            tell(replicas, exchange, exchange.end_step())
    return totals


def in_steps(recorded: list[Recorded], siblings: int) -> list[list[tuple[int, Recorded]]]:
    """(replica, trajectory) of each step: all groups once, then again with their next attempts."""
    groups: dict[str, list[Recorded]] = defaultdict(list)
    for each in recorded:
        groups[each.group].append(each)
    names, steps = list(groups), []
    for attempt in range(0, max(map(len, groups.values())), siblings):
        for first in range(0, len(names), GROUPS_PER_STEP):
            steps.append(
                [
                    ((first + index + attempt + sibling) % REPLICAS, each)
                    for index, name in enumerate(names[first : first + GROUPS_PER_STEP])
                    for sibling, each in enumerate(groups[name][attempt : attempt + siblings])
                ]
            )
    return [step for step in steps if step]


def tell(replicas: list[Replay], exchange: Exchange, batches: list[Batch]) -> None:
    for batch in batches:
        sequences = replicas[batch.source].history.export_sequences(batch.lengths).cut(batch.lengths)
        for target in batch.targets:
            replicas[target].history.import_sequences(sequences)
            exchange.arrived(batch, target)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "traces", nargs="*", type=Path, help="tau-bench or NeMo-Gym files; a folder is one trace"
    )
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer (default: the bundled one)")
    parser.add_argument(
        "--history-tokens", type=int, default=8_000_000, help="0 leaves the speed comparison out"
    )
    parser.add_argument("--steps", type=int, default=300, help="steps that are timed")
    parser.add_argument("--sharing", action="store_true", help="only what sharing histories is worth")
    options = parser.parse_args()
    try:
        result = run(options)
    except UserError as error:
        print(f"bench_drafting: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    warm_up()
    if options.sharing:
        traces = {path.stem: read_trace(path, encoder(options.tokenizer)) for path in options.traces}
        return {"sharing": {name: compare_sharing(name, recorded) for name, recorded in traces.items()}}
    result: dict[str, Any] = {"goodput_ratio": {}, "acceptance": {}}
    setting: tuple[float, ...] = (24, 1.0, 0.1, 24)
    for path in options.traces:
        recorded = read_trace(path, encoder(options.tokenizer))
        found = compare(path.stem, recorded)
        result["goodput_ratio"][path.stem], result["acceptance"][path.stem] = (
            found["goodput_ratio"],
            found["acceptance"],
        )
        setting = found["setting"] if len(result["acceptance"]) == 1 else setting
    if options.history_tokens:
        result |= compare_speed(options.history_tokens, options.steps, setting)
    return result


if __name__ == "__main__":
    sys.exit(main())
