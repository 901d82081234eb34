"""What a recipe will do, as far as its configuration says so. Nothing is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_war.config import WarConfig
from nemo_war.doctor import features, graphs, host, placement, updates
from nemo_war.doctor.cluster import Cluster, cluster
from nemo_war.doctor.finding import Finding, note, ok, refused
from nemo_war.errors import ConfigError
from nemo_war.generation.nemo_rl.engine_arguments import PROPOSER

Config = Mapping[str, Any]


def plan(config: Config, war: WarConfig) -> Iterator[Finding]:
    """A line for each thing that there is to know, the likeliest surprises last.

    Args:
        config: the whole configuration, as NeMo-RL's scripts have it.
        war: its block.
    """
    if not war.enabled:
        yield note(
            "WAR", "off: the script runs as it is", "++policy.generation.war.enabled=true switches it on"
        )
        return
    try:
        engines = cluster(config)
    except ConfigError as error:
        yield refused("replicas", error)
        return
    generation = config["policy"]["generation"]
    yield _replicas(engines)
    yield _kv(generation)
    yield from placement.judge(config, war)
    yield from _drafts(config, war)
    yield updates.transport(generation)
    yield updates.overlap(config)
    yield host.memory(war, engines)
    yield host.threads(placement.by_http(config))
    yield placement.comparison(war)
    yield from features.judge(config, war, engines)


def _replicas(engines: Cluster) -> Finding:
    where = "shared with training" if engines.colocated else "apart from training"
    return ok(
        "replicas",
        f"{engines.replicas} of {_count(engines.gpus_per_replica, 'GPU')} (TP {engines.tensor}, PP "
        f"{engines.pipeline}, EP {engines.expert}), on {_count(engines.nodes, 'node')} with "
        f"{_count(engines.gpus_per_node, 'GPU')} each, {where}",
        replicas=engines.replicas,
        tensor_parallel=engines.tensor,
        pipeline_parallel=engines.pipeline,
        expert_parallel=engines.expert,
        nodes=engines.nodes,
        gpus=engines.gpus,
        colocated=engines.colocated,
    )


def _kv(generation: Config) -> Finding:
    cfg = generation["vllm_cfg"]
    share, longest = cfg["gpu_memory_utilization"], cfg["max_model_len"]
    kind = cfg.get("kv_cache_dtype", "auto")
    return ok(
        "KV cache",
        f"{share:.0%} of each GPU is the engine's, weights included; max_model_len {longest:,}, "
        f"kv_cache_dtype {kind}. How many tokens fit is what vLLM reports at its start ('GPU KV cache size')",
        gpu_memory_utilization=share,
        max_model_len=longest,
        kv_cache_dtype=kind,
    )


def _drafts(config: Config, war: WarConfig) -> Iterator[Finding]:
    if not war.speculative.enabled:
        yield ok("drafts", "none, as policy.generation.war.speculative.enabled=false", max_draft_tokens=0)
        return
    most = war.speculative.max_draft_tokens
    yield ok(
        "drafts",
        f"up to {most} tokens by {PROPOSER}; vLLM then runs its first model runner, scheduled synchronously",
        max_draft_tokens=most,
        proposer=PROPOSER,
    )
    yield from graphs.judge(config["policy"]["generation"], most)
    yield placement.exchange(config, war)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
