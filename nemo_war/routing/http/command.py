"""The flags of `nemo-war route`, made from the settings."""

from __future__ import annotations

import argparse
import os

from nemo_war.errors import ConfigError
from nemo_war.routing.http.settings import RouterSettings, flag, options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting."""
    parser.add_argument(
        "--replica", action="append", default=[], metavar="URL", help="a replica's URL; once for each"
    )
    parser.add_argument(
        "--token-env", metavar="NAME", help="environment variable with the bearer token clients must present"
    )
    for option in options():
        kind = type(option.default)
        unit = "MS" if option.name.endswith("_ms") else {int: "N", float: "S", str: "TEXT"}[kind]
        parser.add_argument(
            flag(option),
            type=kind,
            default=option.default,
            metavar="|".join(option.metadata["among"]) or unit,
            help=f"{option.metadata['purpose']} (default: %(default)s)",
        )


def read_settings(arguments: argparse.Namespace) -> RouterSettings:
    """The settings that the flags make.

    Raises:
        ConfigError: one of them is not allowed.
    """
    given = {option.name: getattr(arguments, option.name) for option in options()}
    return RouterSettings(tuple(arguments.replica), _token(arguments.token_env), **given)


def _token(name: str | None) -> str:
    token = os.environ.get(name, "") if name is not None else ""
    if name is not None and not token:
        raise ConfigError(
            "--token-env",
            name,
            "allowed: an environment variable that is set and not empty",
            f"export {name}=… before",
        )
    return token
