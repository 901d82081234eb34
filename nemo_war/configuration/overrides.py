"""Overrides from the command line: `a.b=c` sets a key that exists, `++a.b=c` adds one.

The two are apart so that a typing error does not silently add a key nobody reads.
Values are YAML; a mapping is merged into the block, a list replaces the list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_war.configuration.problems import dotted_keys, first_line, nearest, raise_first
from nemo_war.errors import ConfigError

_SHAPE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=+~\[\]]+)(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True)
class Override:
    """One assignment; `adds` says that the key may be new."""

    key: str
    value: Any
    adds: bool


def override(config: DictConfig, texts: Iterable[str]) -> None:
    """Apply the overrides in order, changing `config`.

    Raises:
        ConfigError: some cannot be applied; the others have been.
    """
    problems = []
    for text in texts:
        try:
            _apply(config, _parse(text))
        except ConfigError as problem:
            problems.append(problem)
    raise_first(problems)


def _parse(text: str) -> Override:
    shape = _SHAPE.fullmatch(text)
    if shape is None or not all(part.strip() for part in shape["key"].split(".")):
        key = text.partition("=")[0]
        allowed = "allowed: KEY=VALUE or ++KEY=VALUE with a dotted KEY; lists are replaced whole"
        raise ConfigError(key, text, allowed, "write e.g. grpo.seed=1 or compare.modes=[baseline,war]")
    sign, key, value = shape["sign"], shape["key"].strip(), shape["value"]
    if sign == "~":
        raise ConfigError(key, text, "allowed: KEY=VALUE or ++KEY=VALUE, no ~", f"write {key}=null")
    if sign == "+":
        raise ConfigError(key, text, "allowed: KEY=VALUE or ++KEY=VALUE", f"write ++{key}={value or ''}")
    if not value:
        raise ConfigError(key, text, "allowed: KEY=VALUE", f"write {key}=VALUE, or {key}=null for none")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or first_line(error)
        raise ConfigError(
            key, value, f"allowed: a YAML value, but {problem}", f"write {key}='\"...\"'"
        ) from None
    except OmegaConfBaseException as error:
        raise _refused(key, value, error) from None
    return Override(key, cast(dict, parsed)["value"], adds=sign == "++")


def _apply(config: DictConfig, wanted: Override) -> None:
    _check_place(config, wanted)
    try:
        OmegaConf.update(config, wanted.key, wanted.value, merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise _refused(wanted.key, wanted.value, error) from None


def _check_place(config: DictConfig, wanted: Override) -> None:
    """Walk down to the key: each step on the way must be a block, and must exist."""
    node: Any = config
    names = wanted.key.split(".")
    for depth, name in enumerate(names):
        block = ".".join(names[:depth])
        if isinstance(node, ListConfig):
            allowed = f"allowed: a whole list for {block}; its entries have no keys"
            raise ConfigError(wanted.key, wanted.value, allowed, f"write {block}=[...]")
        if node is not None and not isinstance(node, DictConfig):
            allowed = f"allowed: keys of blocks, but {block} is the value {node!r}"
            raise ConfigError(wanted.key, wanted.value, allowed, f"write {block}=...")
        if node is None or name not in node.keys():  # noqa: SIM118 - `in` denies keys that are still ???
            if wanted.adds:
                return
            raise _unknown(config, node, block, wanted)
        node = OmegaConf.select(
            config, f"{block}.{name}" if block else name, throw_on_resolution_failure=False
        )


def _unknown(config: DictConfig, node: DictConfig | None, block: str, wanted: Override) -> ConfigError:
    there = ", ".join(map(str, node.keys())) if node else "nothing"
    others = (key for key in dotted_keys(config) if not wanted.key.startswith(f"{key}."))
    alike = nearest(wanted.key, others)
    hint = f"did you mean {alike}? " if alike else ""
    allowed = f"allowed: keys that the file has{f' under {block}' if block else ''}: {there}"
    return ConfigError(wanted.key, wanted.value, allowed, f"{hint}write ++{wanted.key}=... to add a key")


def _refused(key: str, value: object, error: Exception) -> ConfigError:
    allowed = f"allowed: a YAML value or ${{...}}, but {first_line(error)}"
    return ConfigError(key, value, allowed, f"correct {key}=...")
