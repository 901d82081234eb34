"""A job's configuration, put together as NeMo-RL's scripts do: a file, what it inherits, overrides."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_war.configuration.problems import first_line
from nemo_war.errors import ConfigError, UserError

START = "start in NeMo-RL's checkout with `uv run python -m ...`, or put the checkout on PYTHONPATH"
"""The way to an interpreter that has NeMo-RL."""


def load(arguments: Sequence[str]) -> dict[str, Any]:
    """The whole configuration.

    Args:
        arguments: of the script: `--config YAML`, and overrides.

    Raises:
        ConfigError: no file is named, or it cannot be read, or an override cannot be applied.
        UserError: there is no NeMo-RL here.
    """
    path, overrides = _split(arguments)
    theirs = _loader()
    theirs.register_omegaconf_resolvers()
    try:
        config = theirs.load_config(path)
        if overrides:
            config = theirs.parse_hydra_overrides(config, overrides)
        return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]
    except theirs.OverridesError as error:
        raise _not_applied(overrides, str(error)) from None
    except OmegaConfBaseException as error:
        raise _not_resolved(path, error) from None
    except OSError as error:
        key = "--config" if Path(error.filename) == Path(path).absolute() else "defaults"
        allowed = f"allowed: a YAML file that can be read, but {error.strerror}"
        raise ConfigError(key, str(error.filename), allowed, f"correct {key}") from None
    except (yaml.YAMLError, AssertionError) as error:  # the latter: it is no mapping
        said = " ".join(str(error).split())
        raise ConfigError("--config", path, f"allowed: YAML, but {said}", "correct the file") from None


def generation_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`policy.generation`; empty where there is none."""
    return (config.get("policy") or {}).get("generation") or {}


def _split(arguments: Sequence[str]) -> tuple[str, list[str]]:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config")
    options, overrides = parser.parse_known_args(list(arguments))
    if not options.config:
        raise ConfigError(
            "--config", None, "allowed: a YAML file", "name it: each script has a default of its own"
        )
    return options.config, overrides


def _loader() -> ModuleType:
    try:
        from nemo_rl.utils import config
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "nemo_rl":
            raise
        raise UserError(f"there is no NeMo-RL for this Python: {START}") from None
    return config


def _not_applied(overrides: Sequence[str], said: str) -> ConfigError:
    """An override that Hydra refused; a key that is not there is the usual one."""
    unknown = re.search(r"Could not override '([^']+)'", said)
    if unknown is None:
        allowed = f"allowed: KEY=VALUE, or ++KEY=VALUE for a new key, but {first_line(Exception(said))}"
        return ConfigError("overrides", " ".join(overrides), allowed, "correct it")
    key = unknown[1]
    value = next((text.partition("=")[2] for text in overrides if text.startswith(f"{key}=")), "")
    return ConfigError(
        key, value, "allowed: keys that the recipe has; a new one needs ++", f"write ++{key}={value}"
    )


def _not_resolved(path: str, error: OmegaConfBaseException) -> ConfigError:
    """A value that stands for another one which is not there; an exported variable is the usual one."""
    key = error.full_key or "--config"
    variable = re.search(r"Environment variable '([^']+)' not found", str(error))
    if variable is not None:
        name = variable[1]
        allowed = f"allowed: a variable that is exported, and {name} is not"
        return ConfigError(key, f"${{oc.env:{name}}}", allowed, f"export {name}=... before")
    allowed = f"allowed: keys and ${{...}} that can be resolved, but {first_line(error)}"
    return ConfigError(key, path, allowed, f"correct {key}")
