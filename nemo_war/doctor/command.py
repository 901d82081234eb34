"""`nemo-war doctor`: is this installation fit for WAR, and what will a recipe do?"""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_war.errors import ConfigError, UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; everything else goes to stderr"
    )
    parser.add_argument("--config", metavar="YAML", help="also say what this recipe for NeMo-RL will do")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="of the recipe, as its script takes them"
    )


def doctor(arguments: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit status: 0, or 1 where something is to be mended.

    Raises:
        UserError: it was called in a way that makes no sense.
    """
    path, overrides = arguments.config, arguments.overrides
    if overrides and path is None:
        raise UserError(f"{overrides[0]}: overrides are those of a recipe; name one with --config YAML")
    if path is not None and not Path(path).is_file():
        raise ConfigError("--config", path, "allowed: a YAML file that exists", "name another one")
    from rich.console import Console

    from nemo_war.doctor.examination import examine
    from nemo_war.doctor.report import show, to_json
    from nemo_war.telemetry.progress import stage

    report = examine(path, overrides, stage)
    if arguments.json:
        print(to_json(report))
    else:
        show(report, Console(highlight=False))
    return 1 if report.failures else 0
