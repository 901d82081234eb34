"""All policies by the name a configuration gives them."""

from __future__ import annotations

from collections.abc import Callable

from nemo_war.config import PolicyName
from nemo_war.routing.consistent_hash import ConsistentHash
from nemo_war.routing.least_outstanding import LeastOutstanding
from nemo_war.routing.options import Options
from nemo_war.routing.policy import Policy
from nemo_war.routing.published import Published
from nemo_war.routing.round_robin import RoundRobin
from nemo_war.routing.sticky import Sticky
from nemo_war.routing.workload_aware import WorkloadAware

_BY_NAME: dict[PolicyName, Callable[[int], Policy]] = {
    "sticky": Sticky,
    "least_outstanding": LeastOutstanding,
    "round_robin": RoundRobin,
    "consistent_hash": ConsistentHash,
    "published": Published,
}


def make(name: PolicyName, seed: int = 0, options: Options | None = None) -> Policy:
    """The policy of this name.

    Args:
        name: one that the configuration allows.
        seed: of its ties.
        options: of `war`; the others have none.
    """
    if name == "war":
        return WorkloadAware(options, seed)
    return _BY_NAME[name](seed)
