from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


class OverridesError(Exception):
    pass


def load_config(config_path: str | Path) -> Any:
    return OmegaConf.load(config_path)


def parse_hydra_overrides(cfg: Any, overrides: list[str]) -> Any:
    return OmegaConf.merge(cfg, OmegaConf.from_dotlist([each.lstrip("+") for each in overrides]))


def register_omegaconf_resolvers() -> None:
    pass
