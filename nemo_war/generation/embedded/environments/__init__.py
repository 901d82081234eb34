"""The environments of the embedded run, by the name a configuration calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nemo_war.errors import ConfigError, choices
from nemo_war.generation.embedded.environments.calculator import CalculatorEnvironment
from nemo_war.generation.embedded.environments.file_edit import FileEditEnvironment
from nemo_war.generation.embedded.environments.interface import Environment

ENVIRONMENTS: dict[str, Callable[[Any], Environment]] = {
    "calculator": CalculatorEnvironment,
    "file_edit": FileEditEnvironment,
}


def build(name: str, cfg: Any) -> Environment:
    """The environment of that name.

    Args:
        name: a key of `ENVIRONMENTS`.
        cfg: its validated block, e.g. a `FileEditConfig`.

    Raises:
        ConfigError: there is no such environment.
    """
    if name not in ENVIRONMENTS:
        raise ConfigError("env.name", name, choices(ENVIRONMENTS), "name one of these environments")
    return ENVIRONMENTS[name](cfg)
