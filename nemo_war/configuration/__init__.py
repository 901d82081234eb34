"""From a YAML file and a few `a.b=c` to a checked configuration.

    compose (`defaults:`) → override (`a.b=c`) → resolve (`${a.b}`) → validate (pydantic)

Nothing here knows a key by name, or imports torch, ray or vllm. Whatever is wrong
becomes one `ConfigError`: the first failure, and how many more there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nemo_war.configuration.composition import compose
from nemo_war.configuration.interpolation import resolve
from nemo_war.configuration.overrides import override
from nemo_war.configuration.validation import validate

__all__ = ["load", "validate"]


def load(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The configuration of a file as plain data, inherited, overridden and resolved.

    Raises:
        ConfigError: the file, what it inherits, an override or an interpolation is wrong.
    """
    config = compose(Path(path))
    override(config, overrides)
    return resolve(config)
