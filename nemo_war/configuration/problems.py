"""Helpers that turn failures into one helpful `ConfigError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_war.errors import ConfigError


def raise_first(problems: Iterable[ConfigError]) -> None:
    """Raise the first problem, saying how many more there are; return if there is none."""
    found = list(problems)
    if not found:
        return
    first = found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    raise ConfigError(first.key, first.value, first.allowed, first.fix + more)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like a mistyped one, if any is alike."""
    matches: Sequence[str] = difflib.get_close_matches(name, list(known), n=1)
    return matches[0] if matches else None


def dotted_keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Every key of a `DictConfig`, the blocks' own included."""
    for name in node:
        yield f"{prefix}{name}"
        if not (OmegaConf.is_missing(node, name) or OmegaConf.is_interpolation(node, name)):
            child = node[name]
            if isinstance(child, DictConfig):
                yield from dotted_keys(child, f"{prefix}{name}.")


def first_line(error: Exception) -> str:
    """What an exception says, without the lines that libraries append."""
    return str(error).strip().split("\n", 1)[0]
