"""Replace `${a.b}` and `${mul:${a},${b}}` by their values.

The resolvers are those that NeMo-RL's recipes may use: add, mul, div, max.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from nemo_war.configuration.problems import dotted_keys, first_line, nearest, raise_first
from nemo_war.errors import ConfigError

_RESOLVERS = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
}
_DEEPEST = 32
"""No configuration nests like this; two blocks that interpolate each other do, without end."""
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def resolve(config: DictConfig) -> dict[str, Any]:
    """The configuration as plain data.

    Raises:
        ConfigError: an interpolation fails, or a mandatory `???` was never given.
    """
    _register_resolvers()
    problems: list[ConfigError] = []
    plain = _plain(config, "", config, problems)
    raise_first(problems)
    return plain


def _register_resolvers() -> None:
    """OmegaConf's registry is global: leave what NeMo-RL or a caller has put there."""
    for name, function in _RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            with warnings.catch_warnings():
                # Renamed in OmegaConf 2.4, where 2.3 has another function of the new name.
                warnings.simplefilter("ignore")
                OmegaConf.register_new_resolver(name, function)


def _plain(node: Any, key: str, config: DictConfig, problems: list[ConfigError]) -> Any:
    if isinstance(node, DictConfig):
        prefix = f"{key}." if key else ""
        names: Any = node.keys()  # integers too: the model refuses them with their path
        return {str(name): _child(node, name, f"{prefix}{name}", config, problems) for name in names}
    if isinstance(node, ListConfig):
        return [_child(node, index, f"{key}[{index}]", config, problems) for index in range(len(node))]
    return node


def _child(node: Any, name: Any, key: str, config: DictConfig, problems: list[ConfigError]) -> Any:
    if key.count(".") > _DEEPEST:
        top = key.split(".", 1)[0]
        raise ConfigError(
            top, "${...}", "allowed: blocks that do not contain themselves", f"cut the circle in {top}"
        )
    try:
        return _plain(node[name], key, config, problems)
    except OmegaConfBaseException as error:
        raw = OmegaConf.to_container(node, resolve=False)[name]  # type: ignore[index]
        problems.append(_explain(key, raw, error, config))
        return None


def _explain(key: str, raw: Any, error: OmegaConfBaseException, config: DictConfig) -> ConfigError:
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(key, raw, "allowed: a value in place of ???", f"add {key}=VALUE")
    known = set(dotted_keys(config))
    missing = [name for name in _REFERENCE.findall(str(raw)) if name not in known]
    alike = nearest(missing[0], known) if missing else None
    resolvers = "|".join(_RESOLVERS)
    allowed = f"allowed: ${{existing.key}} or ${{{resolvers}:a,b}}, but {first_line(error)}"
    return ConfigError(key, raw, allowed, f"write ${{{alike}}}" if alike else f"correct {key}")
