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

With `--runs N` as many faults are struck at whole runs, each a job of `nemo-war run` of its own with a fake
engine and a tiny policy: signals (`sigterm_run`, `sigint_run`, `kill_run`), a full disk under the run's
folder or the checkpoints (`full_disk_run`, `full_disk_checkpoints`, on small disks of their own, which takes
root), a damaged checkpoint (`corrupt_checkpoint`). Then it is started again and has to end well. JSON has
`runs`: processes; `steps` `expected` and `found`; `late`: signals after the last step, which are no faults;
`records_told_lost` and `checkpoints_told_lost` to full disks; `lost` steps; `duplicated`: steps that were
done again although a checkpoint had them; `orphans`: processes, shared memory and parts of files or
checkpoints; `broken`: other promises, of exit status, messages, reports, checkpoints and logs;
`recovery_s`: from a start to its first rollouts' end.

Example: python -m tools.chaos --faults 200 --seed 1 --in-flight pause
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tools.chaos_bench.engines import FakeEngines, RealEngines
from tools.chaos_bench.kinds import KINDS
from tools.chaos_bench.result import Result
from tools.chaos_bench.run import Run, Settings
from tools.chaos_bench.run_plan import RUN_KINDS
from tools.chaos_bench.runs import Runs, RunsSettings
from tools.chaos_bench.runs_result import RunsResult


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, help="default: 2000, with real engines 30, with --sabotage 0")
    parser.add_argument("--runs", type=int, metavar="N", help="strike N faults at whole runs instead")
    parser.add_argument("--engines", choices=["fake", "real"], default="fake")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in-flight", choices=["drain", "pause", "abort"], default="pause")
    parser.add_argument("--replicas", type=int, help="default: 4, with real engines 2, with --runs 1")
    parser.add_argument(
        "--kinds", nargs="+", choices=[*KINDS, *RUN_KINDS], metavar="KIND", help="default: all"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/chaos"), help="for orders and logs")
    parser.add_argument(
        "--sabotage",
        action="store_true",
        help="turn the salt off and have resets pretended: stale turns must be found",
    )
    arguments = parser.parse_args()
    if arguments.runs is not None:
        kinds = tuple(kind for kind in RUN_KINDS if kind in (arguments.kinds or RUN_KINDS))
        if not kinds or arguments.engines == "real":
            parser.error(f"--runs takes fake engines, and of kinds {', '.join(RUN_KINDS)}")
        return _finish(
            Runs(
                RunsSettings(arguments.runs, arguments.seed, kinds, arguments.folder, arguments.replicas or 1)
            )()
        )
    if set(arguments.kinds or ()) & set(RUN_KINDS):
        parser.error(f"{', '.join(RUN_KINDS)} are for --runs")
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
    return _finish(Run(settings, engines)())


def _finish(result: Result | RunsResult) -> int:
    for sentence in result.wrong:
        print(f"chaos: {sentence}", file=sys.stderr)
    print(json.dumps(result.to_json()))
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
