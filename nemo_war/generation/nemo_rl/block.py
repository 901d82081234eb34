"""The `policy.generation.war` block in a NeMo-RL configuration, and what may not stand beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_war.config import WarConfig
from nemo_war.configuration.problems import raise_first
from nemo_war.configuration.schema import as_yaml
from nemo_war.configuration.validation import validate
from nemo_war.errors import ConfigError

KEY = "war"
_GENERATION = "policy.generation"
_BLOCK = f"{_GENERATION}.{KEY}"
_NO_DRAFTS = f"set {_BLOCK}.speculative.enabled=false"
_KWARGS = f"{_GENERATION}.vllm_kwargs"
_DECIDED_ELSEWHERE = {
    "refit": "grpo.async_grpo.in_flight_weight_updates says whether turns go on over an update, and an "
    "update that fails ends the step",
    "health": "async_rl.generation_fleet_health watches the replicas",
}
"""Blocks by what decides in their place."""


def war_of(generation: Mapping[str, Any]) -> WarConfig:
    """The block of a generation configuration; without one, WAR is off.

    Raises:
        ConfigError: it is wrong in itself, or beside the rest of the generation's configuration.
    """
    if generation.get(KEY) is None:
        return WarConfig(enabled=False)
    war = validate(generation[KEY], WarConfig, _BLOCK)
    if war.enabled:
        raise_first(conflicts(generation, war))
    return war


def conflicts(generation: Mapping[str, Any], war: WarConfig) -> Iterator[ConfigError]:
    """Every conflict, the most likely to be meant first."""
    if generation.get("backend", "vllm") != "vllm":
        yield ConfigError(
            f"{_GENERATION}.backend",
            generation["backend"],
            "allowed: vllm, whose worker groups WAR runs on",
            f"set {_GENERATION}.backend=vllm or {_BLOCK}.enabled=false",
        )
    if generation.get("quant_cfg") is not None:
        yield ConfigError(
            f"{_GENERATION}.quant_cfg",
            generation["quant_cfg"],
            "allowed: null, as WAR extends NeMo-RL's plain workers and not those for quantized rollouts",
            f"set {_GENERATION}.quant_cfg=null or {_BLOCK}.enabled=false",
        )
    if (generation.get("vllm_cfg") or {}).get("enable_prefix_caching") is False:
        yield ConfigError(
            f"{_GENERATION}.vllm_cfg.enable_prefix_caching",
            False,
            "allowed: true or null, as placement is about what prefix caches hold",
            f"set {_GENERATION}.vllm_cfg.enable_prefix_caching=true or {_BLOCK}.enabled=false",
        )
    yield from _without_effect(war)
    if war.speculative.enabled:
        yield from _without_drafts(generation)


def _without_effect(war: WarConfig) -> Iterator[ConfigError]:
    """Keys that the embedded run follows, and that NeMo-RL decides by keys of its own."""
    for name, instead in _DECIDED_ELSEWHERE.items():
        block = getattr(war, name)
        for key, field in type(block).model_fields.items():
            value = getattr(block, key)
            if value != field.default:
                allowed = f"allowed: {as_yaml(field.default)}, as in a NeMo-RL job {instead}"
                yield ConfigError(f"{_BLOCK}.{name}.{key}", value, allowed, f"remove {_BLOCK}.{name}.{key}")


def _without_drafts(generation: Mapping[str, Any]) -> Iterator[ConfigError]:
    """What vLLM cannot combine with WAR's drafter."""
    kwargs, cfg = generation.get("vllm_kwargs") or {}, generation.get("vllm_cfg") or {}
    drafter = kwargs.get("speculative_config")
    if drafter and drafter.get("num_speculative_tokens") != 0:  # 0 is NeMo-RL's way to switch it off
        yield ConfigError(
            f"{_KWARGS}.speculative_config",
            drafter,
            "allowed: none, as WAR drafts by itself and an engine has one drafter",
            f"remove it, or keep it and {_NO_DRAFTS}",
        )
    if kwargs.get("async_scheduling"):
        yield ConfigError(
            f"{_KWARGS}.async_scheduling",
            True,
            "allowed: null or false, as vLLM schedules synchronously with a drafter in Python",
            f"remove it, or {_NO_DRAFTS}",
        )
    if kwargs.get("logits_processors"):
        yield ConfigError(
            f"{_KWARGS}.logits_processors",
            kwargs["logits_processors"],
            "allowed: none, as vLLM rejects every request with speculation and processors of one's own",
            f"remove it, or {_NO_DRAFTS}",
        )
    if cfg.get("pipeline_parallel_size", 1) > 1:
        yield ConfigError(
            f"{_GENERATION}.vllm_cfg.pipeline_parallel_size",
            cfg["pipeline_parallel_size"],
            "allowed: 1, as drafting over pipeline stages is untested",
            f"set it to 1, or {_NO_DRAFTS}",
        )
