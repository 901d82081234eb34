"""What a refit costs, what it keeps, and what stock parts get wrong around one.

`stock`: {old_to_new, equal_below, different_above: nats; reset_in_flight: a prefix-cache reset while a
request runs, {stock, ours}: {in_flight, reset_returned, to_fresh: nats from an engine that was started
with the new weights, stale}; sleep_wake: {stock: {blocked: what this build says to sleep mode, or null;
level_1_without_the_mode, level_0, without_reset: {to_fresh, stale}}, ours}; dead_replica: {router:
{before, at_once, later: {status, replica, seconds}}}, of a session whose replica is killed}.

`overhead`: {in_flight: {idle, running: {load_s, refit_s, overhead_s, overhead_share, ...}}}, see
`tools.refit_bench.overhead`.

`acceptance`: {kind of task: {phases: {name: {turns, output_tokens, drafts, draft_tokens, accepted_tokens,
acceptance_length, draft_share, tokens_per_step}}, steady_range: of the acceptance length; share_of_steady:
{name: {acceptance_length, tokens_per_step}}}}, see `tools.refit_bench.acceptance`.

The last line of the output is JSON, with a key for each part that was run.

Example: python -m tools.bench_refit --peers VENV/bin
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from nemo_war.generation.embedded import model
from tools.refit_bench.acceptance import acceptance
from tools.refit_bench.overhead import overhead
from tools.refit_bench.stock import stock
from tools.refit_bench.tasks import KINDS

PARTS = ("stock", "overhead", "acceptance")
_OBJECT_STORE_BYTES = 2 * 1024**3
"""Room for a few policies at once."""


async def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The parts in turn, each shown when it is done."""
    where = model.resolve(model.BUNDLED, print)
    parts = {
        "stock": lambda: stock(where, folder, arguments.peers),
        "overhead": lambda: overhead(where, arguments.refits),
        "acceptance": lambda: acceptance(where, folder, arguments.turns, arguments.tasks, arguments.sureness),
    }
    result = {}
    for part in arguments.parts:
        started = time.perf_counter()
        result[part] = await parts[part]()
        print(json.dumps({part: result[part]}))
        print(f"{part}: {time.perf_counter() - started:.0f} s", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--peers", type=Path, help="folder with vllm-router and sglang-router")
    parser.add_argument("--refits", type=int, default=10, help="that count, of each kind")
    parser.add_argument("--turns", type=int, default=100, help="of a phase of `acceptance`, at least")
    parser.add_argument(
        "--tasks", nargs="+", choices=list(KINDS), default=list(KINDS), help="of `acceptance`"
    )
    parser.add_argument("--sureness", type=float, help="factor on the policy's logits in `acceptance`")
    arguments = parser.parse_args()
    root = str(Path(__file__).parents[1])
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=_OBJECT_STORE_BYTES,
        runtime_env={"env_vars": {"PYTHONPATH": root}},
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = asyncio.run(run(arguments, Path(folder)))
    finally:
        ray.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    main()
