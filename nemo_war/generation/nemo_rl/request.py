"""How a request of vLLM's carries a turn's identity and its policy epoch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nemo_war.metadata import KEY, TurnMetadata


def salted(prompt: Any, epoch: int) -> Any:
    """The prompt with a cache salt of this policy epoch, added to one that it has.

    Args:
        prompt: text, token ids, or one of vLLM's dictionaries.
        epoch: of the policy that is to answer.
    """
    salt = f"epoch-{epoch}"
    if isinstance(prompt, Mapping):
        own = prompt.get("cache_salt")
        return {**prompt, "cache_salt": f"{salt}/{own}" if own else salt}
    if isinstance(prompt, str):
        return {"prompt": prompt, "cache_salt": salt}
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt, "cache_salt": salt}
    prompt.cache_salt = salt if not prompt.cache_salt else f"{salt}/{prompt.cache_salt}"  # an engine request
    return prompt


def announced(params: Any) -> TurnMetadata | None:
    """What a request that came by HTTP says of itself; None where that is nothing, or makes no sense.

    vLLM takes no objects in the fields that end here, so that it may be JSON.
    """
    said = (params.extra_args or {}).get(KEY)
    try:
        return TurnMetadata.from_extra_args({KEY: json.loads(said) if isinstance(said, str) else said})
    except (ValueError, RecursionError):
        return None


def is_piecewise(params: Any) -> bool:
    """Whether each output holds what is new only, as for an answer that is streamed."""
    return params.output_kind.name == "DELTA"


def announcing(params: Any, turn: TurnMetadata) -> Any:
    """A copy of sampling parameters that says whose turn it is; a batch may share one object."""
    params = params.clone()
    params.extra_args = {**(params.extra_args or {}), **turn.to_extra_args()}
    return params
