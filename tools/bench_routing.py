"""Where turns go, and what that costs: ours against two routers of the field, on identical traces.

Over HTTP each router stands in front of the same mock replicas (`nemo_war.simulation.server`), as a
process of its own, and serves the same sessions: of tau-bench with seeded tool delays, and a capped, seeded
subset of kv-cache-tester with such delays too. In process the same scheduler drives the same simulated
replicas without HTTP, for ablations.

The last line is JSON, with a key for each part that was run; each part's own JSON is printed when it is done
and kept in the folder, with a line in `runs.jsonl` for each run.

`in_process` and `http` have `scenarios`: {scenario: {policy: {makespan, hit_rate, recomputed_tokens,
imbalance, p99_turn_wait, moves, failed, turns, output_tokens}}}, medians over the seeds (seconds, shares,
tokens), and `ratios`: {scenario: {ratio_vs_best_peer, ratio_vs_sticky, ratio_vs_round_robin,
ratio_vs_oracle}}, each [median, least, most] of our makespan to theirs, below 1 is better; best peer over
HTTP only. `in_process.ablation`: {scenario: {what: ratio of the makespan without it to ours}}.
`calibration`: {scenario: {bias: of the remaining output tokens predicted before each turn, their sum to what
it was; error: mean absolute, as a share; error_of_a_constant; within_high: how often the 90 % quantile
sufficed}}. `decision`: {replicas: {p50_us, p99_us, mib}}.

`siblings` (one group of 64 at once) and `one_after_another` (200 requests): {in_process, http: {policy:
{replicas: for each seed what each replica had, output tokens or requests; idle_replicas: most that had
nothing; max_over_mean}}}. `killed` (one replica of four dies and comes back): {in_process, http: {policy:
{ratio: makespan to the undisturbed one; ratio_scaled: of that, what the lost capacity does not explain;
outage_s, failed}}}. `overhead`: {body size and concurrency: {router: {requests_per_s, p50_ms, p99_ms,
cpu_ms: of the router per request; added_p50_ms, added_p99_ms: to `direct`, which is without a router, and
whose cpu_ms is the replicas'}}}, medians. Intervals are [median, least, most] over the seeds.

Example: python -m tools.bench_routing TRACES --tokenizer FOLDER --peers VENV/bin --parts http --seeds 3
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.routing_bench.bench import Bench
from tools.routing_bench.calibration import calibration
from tools.routing_bench.decisions import decision
from tools.routing_bench.in_process import in_process
from tools.routing_bench.measurement import table
from tools.routing_bench.outages import killed
from tools.routing_bench.over_http import http
from tools.routing_bench.overhead import overhead
from tools.routing_bench.scenarios import SCENARIOS, Workloads
from tools.routing_bench.spread import one_after_another, siblings

PARTS: dict[str, Callable[[Bench], Any]] = {
    "in_process": in_process,
    "calibration": calibration,
    "decision": decision,
    "http": http,
    "siblings": siblings,
    "one_after_another": one_after_another,
    "killed": killed,
    "overhead": overhead,
}


def run(bench: Bench, parts: list[str]) -> dict[str, Any]:
    """The parts in turn, each kept when it is done."""
    result = {}
    for part in parts:
        result[part] = PARTS[part](bench)
        if "scenarios" in result[part]:
            print(table(result[part]["scenarios"]))
        line = json.dumps({part: result[part]})
        (bench.folder / f"{part}.json").write_text(line + "\n")
        print(line, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, help="folder with tau_bench_airline.json and kv_cache_tester/")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a Hugging Face tokenizer")
    parser.add_argument("--peers", type=Path, help="folder with sglang-router and vllm-router")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--http", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/bench_routing"), help="for logs and results"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    workloads = Workloads(arguments.traces, arguments.tokenizer)
    bench = Bench(
        workloads, arguments.peers, arguments.seeds, arguments.scenarios, arguments.http, arguments.folder
    )
    print(json.dumps(run(bench, arguments.parts)))


if __name__ == "__main__":
    main()
