"""Faults by the thousand: nothing is lost, nothing is answered twice, and nothing stale is served.

GRPO-like steps of multi-turn trajectories run on a fleet of embedded replicas, with a refit amid each step,
while replicas are killed, stopped, hung and broken, and transfers and resets fail, by a plan that a seed
draws. One replica is always left alone. Everything is our own code as it is; the engines are fakes of vLLM's
interface that tell on stale KV token by token, or vLLM's own on the bundled model.

The last line is JSON: `faults` survived, and `together` of them while another one was not over; `steps`,
`refits`, and `left_behind`, replicas that a refit had to go on without; turns `started`, `finished` and
`retried`, `most_attempts` at one turn, `mixed` ones with tokens of more than one policy; `lost`: turns that
raised; `duplicated`: turns that were answered twice, or whose tokens are not one answer's; `stale_turns`:
with tokens of a policy that they may not be of, by their stamps and, with fake engines, by every logprob,
with real ones by what `probed` replicas say to one prompt; `orphans`: processes, actors, shared memory and
open memory files left over; `unexplained`: fences that no fault explains, of a machine too slow for the
probes; `memory_slope`: MiB per 1,000 faults {process: slope}; `recovery_s`: {kind: {median, worst, faults}},
from the fault to its replica serving again; `seconds`.

The status is 0 only where `lost`, `duplicated`, `stale_turns` and `orphans` are; 1 where they are not or a
fault was not survived; 3 where nothing happened any more, with what waits for what in the folder.

Example: python -m tools.chaos --faults 200 --seed 1 --in-flight pause
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tools.chaos_bench.engines import FakeEngines, RealEngines
from tools.chaos_bench.kinds import KINDS
from tools.chaos_bench.run import Run, Settings


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, help="default: 2000, with real engines 30, with --sabotage 0")
    parser.add_argument("--engines", choices=["fake", "real"], default="fake")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in-flight", choices=["drain", "pause", "abort"], default="pause")
    parser.add_argument("--replicas", type=int, help="default: 4, with real engines 2")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, metavar="KIND", help="default: all")
    parser.add_argument("--folder", type=Path, default=Path("runs/chaos"), help="for orders and logs")
    parser.add_argument(
        "--sabotage",
        action="store_true",
        help="turn the salt off and have resets pretended: stale turns must be found",
    )
    arguments = parser.parse_args()
    real = arguments.engines == "real"
    if real and arguments.sabotage:
        parser.error("--sabotage is for fake engines: a real one does not pretend")
    faults, replicas = arguments.faults, arguments.replicas
    settings = Settings(
        (30 if real else 0 if arguments.sabotage else 2000) if faults is None else faults,
        arguments.seed,
        arguments.in_flight,
        (2 if real else 4) if replicas is None else replicas,
        arguments.folder,
        arguments.kinds or (),
    )
    if settings.replicas < 2:
        parser.error(f"--replicas {settings.replicas}: it takes 2, as one is always left alone")
    engines = RealEngines() if real else FakeEngines(arguments.sabotage)
    result = Run(settings, engines)()
    for sentence in result.wrong:
        print(f"chaos: {sentence}", file=sys.stderr)
    print(json.dumps(result.to_json()))
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
