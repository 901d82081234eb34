"""The engines that a recipe asks for, by NeMo-RL's rules: how many, of how many GPUs, on which nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_war.errors import ConfigError

Config = Mapping[str, Any]

_RESOURCES = "policy.generation.colocated.resources"
_PARALLEL = "policy.generation.vllm_cfg.tensor_parallel_size"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Engines on nodes.

    Attributes:
        nodes: that generate.
        gpus_per_node: of these, for generation.
        tensor, pipeline, expert: parallel sizes of an engine.
        colocated: whether training has the same GPUs.
    """

    nodes: int
    gpus_per_node: int
    tensor: int
    pipeline: int
    expert: int
    colocated: bool

    @property
    def gpus(self) -> int:
        """GPUs that generate."""
        return self.nodes * self.gpus_per_node

    @property
    def gpus_per_replica(self) -> int:
        """GPUs of an engine."""
        return self.tensor * self.pipeline

    @property
    def replicas(self) -> int:
        """Engines."""
        return self.gpus // self.gpus_per_replica

    @property
    def replicas_per_node(self) -> int:
        """Most engines whose first worker, which drafts, is on one node."""
        return max(1, self.gpus_per_node // self.gpus_per_replica)


def cluster(config: Config) -> Cluster:
    """What a configuration asks for.

    Raises:
        ConfigError: what NeMo-RL would refuse once the nodes are there.
    """
    generation = config["policy"]["generation"]
    cfg, colocated = generation["vllm_cfg"], bool(generation["colocated"]["enabled"])
    nodes, gpus = _shared(config) if colocated else _apart(config)
    found = Cluster(
        nodes,
        gpus,
        cfg["tensor_parallel_size"],
        cfg.get("pipeline_parallel_size") or 1,
        cfg.get("expert_parallel_size") or 1,
        colocated,
    )
    if found.gpus % found.gpus_per_replica:
        allowed = f"allowed: sizes whose product divides the {found.gpus} GPUs that generate"
        raise ConfigError(_PARALLEL, found.tensor, allowed, f"set {_PARALLEL}=1, or use other nodes")
    return found


def _shared(config: Config) -> tuple[int, int]:
    """Nodes and GPUs on each, where training has them too; a reward model has its own."""
    nodes, gpus = config["cluster"]["num_nodes"], config["cluster"]["gpus_per_node"]
    reward_nodes, reward_gpus = _reward_model(config)
    return (1, gpus - reward_gpus) if nodes == 1 else (nodes - reward_nodes, gpus)


def _apart(config: Config) -> tuple[int, int]:
    """Nodes and GPUs on each, where they are for generation only."""
    resources = config["policy"]["generation"]["colocated"]["resources"]
    gpus, own = resources.get("gpus_per_node"), config["cluster"]["gpus_per_node"]
    if config["cluster"]["num_nodes"] == 1:
        if not gpus or gpus >= own:
            allowed = f"allowed: 1 to {own - 1} on a single node, as the others train"
            raise ConfigError(f"{_RESOURCES}.gpus_per_node", gpus, allowed, f"set it to {own // 2}")
        return 1, gpus
    if not resources.get("num_nodes"):
        allowed = "allowed: a number of nodes, where generation has its own"
        raise ConfigError(f"{_RESOURCES}.num_nodes", None, allowed, "set it to 1 or more")
    if gpus != own:
        allowed = f"allowed: {own}, as cluster.gpus_per_node, where generation has nodes of its own"
        raise ConfigError(f"{_RESOURCES}.gpus_per_node", gpus, allowed, f"set it to {own}")
    return resources["num_nodes"], gpus


def _reward_model(config: Config) -> tuple[int, int]:
    data = config.get("data") or {}
    blocks = [data.get(key) for key in ("train", "validation", "default")]
    flat = [each for block in blocks for each in (block if isinstance(block, list) else [block])]
    if not any(isinstance(each, Mapping) and each.get("env_name") == "reward_model" for each in flat):
        return 0, 0
    resources = config["env"]["reward_model"]["resources"]
    return resources["num_nodes"], resources["gpus_per_node"]
