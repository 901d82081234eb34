"""The command line: `nemo-war run | report | replay-drafts | route | doctor | check`.

Whatever a user can mend is one line on stderr and exit status 2; an interruption is
130. The commands import their work when they are called, so that `--help` and `check`
need neither torch, ray nor vllm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from nemo_war import __version__
from nemo_war.config import MAX_DRAFT_TOKENS
from nemo_war.doctor.command import add_arguments as add_doctor_arguments
from nemo_war.doctor.command import doctor as run_doctor
from nemo_war.errors import UserError
from nemo_war.routing.http.command import add_arguments, read_settings

USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141

_RECIPE = "examples/configs/grpo_embedded_cpu.yaml"


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line as every other error: in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    try:
        arguments = _arguments(sys.argv[1:] if argv is None else argv)
        return arguments.command(arguments)
    except UserError as error:
        print(f"nemo-war: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("nemo-war: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has gone; the interpreter's last flush must not fail as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    # argparse closes `overrides` at the first option, and users write `run X --compare a.b=c`.
    arguments, rest = parser.parse_known_args(argv)
    stray = [text for text in rest if text.startswith("-") or not hasattr(arguments, "overrides")]
    if stray:
        parser.error(f"unknown argument {stray[0]}")
    if rest:
        arguments.overrides += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nemo-war",
        description="Workload-aware rollouts: a rollout backend for NeMo-RL.",
        epilog=f"example: nemo-war run {_RECIPE} --compare",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"nemo-war {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    run = _command(
        commands, "run", "run GRPO steps on local vLLM replicas", f"{_RECIPE} --compare grpo.max_num_steps=2"
    )
    _add_config(run)
    run.add_argument(
        "--compare", action="store_true", help="also time stock vLLM and WAR on the same fixed work"
    )
    run.add_argument(
        "--json", action="store_true", help="print the summary as JSON; everything else goes to stderr"
    )
    run.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="folder of this run (default: a new one in logger.log_dir)",
    )
    run.set_defaults(command=_run)

    report = _command(commands, "report", "summarise a finished run", "runs/latest --json")
    report.add_argument("run", type=Path, metavar="RUN", help="folder of a run, such as runs/latest")
    report.add_argument("--json", action="store_true", help="print the summary as JSON")
    report.set_defaults(command=_report)

    replay = _command(
        commands,
        "replay-drafts",
        "measure acceptance on recorded trajectories, without an engine",
        "runs/latest --plot drafts.svg",
    )
    replay.add_argument(
        "traces", type=Path, nargs="+", metavar="TRACE",
        help="tau-bench or NeMo-Gym recording, a folder of such, or the folder of a run",
    )  # fmt: skip
    replay.add_argument(
        "--tokenizer", type=Path, metavar="DIR",
        help="folder of the tokenizer for recordings of text (default: the bundled model's)",
    )  # fmt: skip
    replay.add_argument(
        "--max-draft-tokens", type=int, default=12, metavar="N", help="longest draft (default: %(default)s)"
    )
    replay.add_argument("--plot", type=Path, metavar="FILE", help="also write the curves to an image")
    replay.add_argument("--json", action="store_true", help="print the figures as JSON")
    replay.set_defaults(command=_replay_drafts)

    router = _command(
        commands,
        "route",
        "route requests of any OpenAI client to replicas, by trajectory",
        "--replica http://127.0.0.1:8001 --replica http://127.0.0.1:8002 --port 8000",
    )
    add_arguments(router)
    router.set_defaults(command=_route)

    doctor = _command(
        commands,
        "doctor",
        "check that this installation of NeMo-RL is fit for WAR, and say what a recipe will do",
        "--config examples/configs/grpo_math_1B_war.yaml cluster.gpus_per_node=8",
    )
    add_doctor_arguments(doctor)
    doctor.set_defaults(command=run_doctor)

    check = _command(commands, "check", "print the resolved configuration, or what is wrong with it", _RECIPE)
    _add_config(check)
    check.add_argument("--json", action="store_true", help="print JSON rather than YAML")
    check.set_defaults(command=_check)
    return parser


def _command(
    commands: argparse._SubParsersAction[_Parser], name: str, purpose: str, example: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=purpose,
        description=purpose[0].upper() + purpose[1:] + ".",
        epilog=f"example: nemo-war {name} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # an example is copied, so it stays one line
        allow_abbrev=False,
    )


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file, see examples/configs")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="a.b=c sets a key, ++a.b=c adds one"
    )


def _run(arguments: argparse.Namespace) -> int:
    # From the start on, and not only once the job has its own handlers.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run_job(arguments)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_job(arguments: argparse.Namespace) -> int:
    from nemo_war.generation.embedded.config import RunConfig
    from nemo_war.generation.embedded.protection import protect_ray

    # Before the job's own imports: a wrong key is found at once, and Ray is to know its token.
    config = RunConfig.load(arguments.config, arguments.overrides)
    protect_ray()
    from nemo_war.generation.embedded.job import run

    if not arguments.json:
        return run(config, compare=arguments.compare, run_dir=arguments.run_dir)
    with contextlib.redirect_stdout(sys.stderr):
        status = run(config, compare=arguments.compare, run_dir=arguments.run_dir)
    if status != 0:
        return status
    from nemo_war.report.main import report

    report(arguments.run_dir or config.logger.log_dir / "latest", as_json=True)
    return status


def _report(arguments: argparse.Namespace) -> int:
    from nemo_war.report.main import report

    return report(arguments.run, as_json=arguments.json)


def _replay_drafts(arguments: argparse.Namespace) -> int:
    from nemo_war.generation.embedded.encoder import encoder
    from nemo_war.report.drafts import replay_drafts
    from nemo_war.speculative.workload import read_trace

    limit = arguments.max_draft_tokens
    if not 1 <= limit <= MAX_DRAFT_TOKENS:
        raise UserError(f"--max-draft-tokens={limit}: allowed: 1 to {MAX_DRAFT_TOKENS}; try 12")
    encode = encoder(arguments.tokenizer)
    recorded = [each for path in arguments.traces for each in read_trace(path, encode)]
    recorded.sort(key=lambda each: each.epoch)
    return replay_drafts(recorded, max_draft_tokens=limit, as_json=arguments.json, plot=arguments.plot)


def _route(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments)
    from nemo_war.routing.http.server import serve
    from nemo_war.telemetry.progress import stage

    serve(settings, stage)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    import yaml

    from nemo_war.generation.embedded.config import RunConfig

    data = RunConfig.load(arguments.config, arguments.overrides).model_dump(mode="json")
    print(json.dumps(data, indent=2) if arguments.json else yaml.safe_dump(data, sort_keys=False).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
