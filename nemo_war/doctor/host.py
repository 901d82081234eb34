"""What WAR takes of a node besides its GPUs."""

from __future__ import annotations

from nemo_war.config import WarConfig
from nemo_war.doctor.cluster import Cluster
from nemo_war.doctor.finding import Finding, ok

BYTES_PER_TOKEN = 26
"""Of a history, with its index."""


def memory(war: WarConfig, cluster: Cluster) -> Finding:
    """Host memory of the histories, taken when the engines start; the rest is small."""
    if not war.speculative.enabled:
        return ok("host memory", "no history, as nothing is drafted", history_bytes_per_node=0)
    tokens = war.speculative.history.max_tokens
    replica = tokens * BYTES_PER_TOKEN
    node = replica * min(cluster.replicas_per_node, cluster.replicas)
    return ok(
        "host memory",
        f"history of {tokens:,} tokens at {BYTES_PER_TOKEN} bytes: {_megabytes(replica)} per replica, "
        f"{_megabytes(node)} per node",
        history_bytes_per_replica=replica,
        history_bytes_per_node=node,
    )


def threads(router: bool) -> Finding:
    """Threads of WAR's own; drafting is done in the engine's, between two of its steps."""
    says = "one in each process that asks for generations, and the scheduler's actor once in the job"
    return ok("threads", says + (", and the router's" if router else ""), threads_per_process=1)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
