"""How weights get from training to the engines of a recipe, and what turns do meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_war.doctor.finding import Finding, fail, ok

Config = Mapping[str, Any]

_TRANSPORT = "policy.generation.refit_transport"
_SPARSE = {"vllm_s3_sparse": "sparse deltas over S3", "vllm_zmq_sparse": "sparse deltas over ZeroMQ"}


def transport(generation: Config) -> Finding:
    """The way that weights take, by NeMo-RL's rules."""
    chosen, colocated = generation.get("refit_transport"), bool(generation["colocated"]["enabled"])
    if chosen is None:
        way = "CUDA IPC and ZeroMQ, on the same GPUs" if colocated else "NCCL, a collective of all"
        return ok("refit", way, refit_transport="ipc" if colocated else "nccl")
    if colocated:
        return fail(
            "refit",
            f"{_TRANSPORT}={chosen}: NeMo-RL takes it only where generation has GPUs of its own",
            f"set {_TRANSPORT}=null, or policy.generation.colocated.enabled=false",
        )
    if chosen == "nccl_reshard":
        return ok("refit", "NCCL, each shard straight into its place (nccl_reshard)", refit_transport=chosen)
    return ok("refit", _SPARSE.get(chosen, f"a checkpoint engine ({chosen})"), refit_transport=chosen)


def overlap(config: Config) -> Finding:
    """Whether turns run while weights change."""
    asynchronous = (config.get("grpo") or {}).get("async_grpo") or {}
    if "async_rl" in config:
        return ok("updates", f"single controller: {_GO_ON}", in_flight_updates=True)
    if not asynchronous.get("enabled"):
        return ok("updates", "synchronous: no turn runs while weights change", in_flight_updates=False)
    if asynchronous.get("in_flight_weight_updates"):
        return ok("updates", f"asynchronous, in flight: {_GO_ON}", in_flight_updates=True)
    return ok("updates", "asynchronous: NeMo-RL lets running turns end before each", in_flight_updates=False)


_GO_ON = "turns that run freeze, and go on under the new weights with their KV computed anew"
