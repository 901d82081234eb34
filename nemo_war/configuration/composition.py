"""Read a YAML file and what it inherits from, by NeMo-RL's rules.

`defaults:` names one file or a list of files, relative to the file that names them.
Later ones win over earlier ones and the file itself over all. A top-level block with
`_override_: true` replaces the inherited block instead of being merged into it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_war.configuration.problems import first_line
from nemo_war.errors import ConfigError

_EXAMPLE = "examples/configs/grpo_embedded_cpu.yaml"


def compose(path: Path) -> DictConfig:
    """The merged configuration, interpolations not yet resolved.

    Raises:
        ConfigError: a file cannot be read, or inheritance goes round in a circle.
    """
    if not path.is_file():
        raise ConfigError(
            "config", str(path), "allowed: a YAML file that exists", f"give one, e.g. {_EXAMPLE}"
        )
    return _compose(path, heirs=())


def _compose(path: Path, heirs: tuple[Path, ...]) -> DictConfig:
    """`heirs` are the files that lead here: meeting one of them again is a cycle."""
    own = _read(path)
    merged = OmegaConf.create({})
    for parent in _parents(own, path):
        line = (*heirs, path.resolve())
        if parent.resolve() in line:
            circle = " -> ".join(step.name for step in (*line, parent))
            raise ConfigError("defaults", circle, "allowed: inheritance without a cycle", f"cut it in {path}")
        merged = _merge(merged, _compose(parent, line))
    return _merge(merged, own)


def _read(path: Path) -> DictConfig:
    try:
        config = OmegaConf.load(path)
    except yaml.YAMLError as error:
        raise _syntax_error(path, error) from None
    except OmegaConfBaseException as error:
        key = error.full_key or "config"
        allowed = f"allowed: valid keys and ${{...}}, but {first_line(error)}"
        raise ConfigError(key, str(path), allowed, "correct the file") from None
    except (OSError, UnicodeError) as error:
        allowed = f"allowed: a readable UTF-8 YAML file with a mapping, but {first_line(error)}"
        raise ConfigError("config", str(path), allowed, "correct the file") from None
    if not isinstance(config, DictConfig):
        raise ConfigError("config", str(path), "allowed: a mapping, not a list", "write key: value lines")
    return config


def _syntax_error(path: Path, error: yaml.YAMLError) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark else str(path)
    problem = getattr(error, "problem", None) or first_line(error)
    line = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the file"
    return ConfigError("config", where, f"allowed: valid YAML, but {problem}", f"correct {line}")


def _parents(own: DictConfig, path: Path) -> list[Path]:
    """Take `defaults` out of the file and check that each of them exists."""
    names: Any = own.pop("defaults", [])
    names = list(names) if isinstance(names, ListConfig | list) else [names]
    for name in names:
        if not isinstance(name, str):
            raise ConfigError("defaults", name, "allowed: a path or a list of paths", f"correct it in {path}")
        if not (path.parent / name).is_file():
            allowed = f"allowed: a YAML file, relative to {path.parent.resolve()}"
            raise ConfigError("defaults", name, allowed, f"correct it in {path}")
    return [path.parent / name for name in names]


def _merge(base: DictConfig, own: DictConfig) -> DictConfig:
    for key in list(own):
        # Reading either would fail: the value may come from an override or another file.
        if OmegaConf.is_missing(own, key) or OmegaConf.is_interpolation(own, key):
            continue
        block = own[key]
        if isinstance(block, DictConfig) and block.get("_override_", False):
            block.pop("_override_")
            base.pop(key, None)
    return cast(DictConfig, OmegaConf.merge(base, own))
