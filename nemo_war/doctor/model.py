"""What kind of model a recipe has, as far as that can be known without the network."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STATES = re.compile(
    r"mamba|jamba|zamba|bamba|falcon-h1|nemotron-?h|nemotron-nano-(9b|12b)-v2|nemotron-3|granite-4|qwen3-next"
    r"|qwen3\.5|kimi-linear|lfm2|minimax-text",
    re.IGNORECASE,
)
"""Names of models whose layers keep a state in place of KV."""
_STATE_LAYERS = ("mamba", "linear_attention", "recurrent", "conv")


def configuration(name: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """A model's `config.json`, from its folder or the hub's cache; None where it is on neither."""
    home = Path(environment.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(environment.get("HF_HUB_CACHE", home / "hub"))
    cached = sorted((hub / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    for path in (Path(name) / "config.json", *cached):
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return None


def keeps_states(name: str, found: Mapping[str, Any] | None) -> bool:
    """Whether some of a model's layers keep a state per request, as Mamba's do, in place of KV.

    Args:
        name: of the model.
        found: its configuration; without it, the name must do.
    """
    if found is None:
        return _STATES.search(name) is not None
    text = found.get("text_config") or found
    kinds = [*(text.get("layer_types") or ()), *(text.get("layers_block_type") or ())]
    return (
        "hybrid_override_pattern" in text
        or any(key.startswith(("mamba_", "ssm_")) for key in text)
        or any(kind.startswith(_STATE_LAYERS) for kind in kinds)
        or "mamba" in str(text.get("model_type")).lower()
    )
