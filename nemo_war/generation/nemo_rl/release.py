"""Which NeMo-RL this is, found out from what it has: main's own number is that of an older release."""

from __future__ import annotations

from nemo_rl.models.generation.vllm import vllm_generation

from nemo_war.config import WarConfig
from nemo_war.errors import ConfigError

_ENABLED = "policy.generation.war.enabled"
_DRAFTS = "policy.generation.war.speculative.enabled"


def check(war: WarConfig) -> None:
    """Refuse what this release cannot do.

    Raises:
        ConfigError: it is older than 0.7; or it is 0.7, and drafts are wanted.
    """
    if not hasattr(vllm_generation, "resolve_generation_worker_cls"):
        raise ConfigError(
            _ENABLED,
            True,
            "allowed: false with this NeMo-RL, which is older than 0.7",
            f"update NeMo-RL, or set {_ENABLED}=false",
        )
    if war.speculative.enabled and not hasattr(vllm_generation.VllmGeneration, "_next_dp_shard_idx"):
        raise ConfigError(
            _DRAFTS,
            True,
            "allowed: false with NeMo-RL 0.7, whose vLLM 0.20 takes no drafter in Python",
            f"set {_DRAFTS}=false, which leaves placement and refits, or update NeMo-RL",
        )
