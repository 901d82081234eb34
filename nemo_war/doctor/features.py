"""What a recipe combines with WAR that nobody has seen together yet, or that cannot go together.

docs/guides/compatibility.md is the whole table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_war.config import WarConfig
from nemo_war.doctor import model
from nemo_war.doctor.cluster import Cluster
from nemo_war.doctor.finding import Finding, fail, note

_POLICY = "policy"
_GENERATION = "policy.generation"
_DRAFTS = f"{_GENERATION}.war.speculative.enabled"
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"

Config = Mapping[str, Any]


def judge(config: Config, war: WarConfig, cluster: Cluster) -> Iterator[Finding]:
    """A line for each of them that the recipe has."""
    policy = config[_POLICY]
    generation = policy["generation"]
    yield from _model(policy, war)
    yield from _layout(cluster)
    yield from _precision(generation)
    yield from _adapters(policy, generation)
    if _is_on(policy.get("router_replay")):
        yield note(
            "router replay",
            "untested; NeMo-RL's own recipes for it are without prefix caching, which WAR needs",
        )
    runner = str((generation["vllm_cfg"].get("env_vars") or {}).get(_RUNNER, ""))
    if war.speculative.enabled and runner.lower() in ("1", "true"):
        yield fail(
            "model runner",
            f"{_RUNNER}={runner}: vLLM's second model runner takes no drafter by its class",
            f"remove it from {_GENERATION}.vllm_cfg.env_vars, or set {_DRAFTS}=false",
        )


def _model(policy: Config, war: WarConfig) -> Iterator[Finding]:
    name = str(policy.get("model_name"))
    found = model.configuration(name)
    source = "by its name" if found is None else "by its config.json"
    if not model.keeps_states(name, found):
        return
    if war.speculative.enabled:
        yield note(
            "hybrid",
            f"{source} {name} has layers with a state; vLLM keeps one per request for each draft token",
            f"set {_DRAFTS}=false",
        )
    else:
        yield note("hybrid", f"{source} {name} has layers with a state: placement is untested with those")


def _layout(cluster: Cluster) -> Iterator[Finding]:
    if cluster.pipeline > 1:
        yield note("PP", f"placement over {cluster.pipeline} pipeline stages is untested")
    if cluster.expert > cluster.tensor:
        yield note("EP", "engines of a group step together where EP is more than TP: untested")
    elif cluster.expert > 1:
        yield note("EP", "a mixture of experts over several GPUs is untested")


def _precision(generation: Config) -> Iterator[Finding]:
    cfg = generation["vllm_cfg"]
    kv = str(cfg.get("kv_cache_dtype", "auto"))
    if kv.startswith("fp8"):
        yield note("FP8", f"KV in {kv} is untested; NeMo-RL takes it with synchronous engines only")
    elif cfg.get("precision") == "fp8":
        yield note("FP8", "weights in FP8 are untested")


def _adapters(policy: Config, generation: Config) -> Iterator[Finding]:
    trained = _is_on((policy.get("dtensor_cfg") or {}).get("lora_cfg")) or _is_on(
        (policy.get("megatron_cfg") or {}).get("peft")
    )
    if (generation.get("vllm_kwargs") or {}).get("enable_lora"):
        yield note("LoRA", "adapters in vLLM are untested")
    elif trained:
        yield note("LoRA", "untested; NeMo-RL sends vLLM merged weights, so that it has no adapters")


def _is_on(block: Any) -> bool:
    return bool((block or {}).get("enabled"))
