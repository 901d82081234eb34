"""Group-relative advantages (GRPO, arXiv 2402.03300), as NeMo-RL defines them.

The advantage of a trajectory is its reward less a baseline made of its siblings'
rewards: the mean of the whole group, or of the others only (leave-one-out, RLOO,
arXiv 2402.14740), which is unbiased. It may be divided by the standard deviation of
the rewards that made the baseline. The source is NeMo-RL's
`calculate_baseline_and_std_per_prompt` and `GRPOAdvantageEstimator`: the same
values, down to the corrected (n - 1) deviation and its epsilon.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

_EPSILON = 1e-6
"""NeMo-RL's; added to the deviation before dividing."""


def advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], normalize: bool, leave_one_out: bool
) -> NDArray[np.float64]:
    """One advantage per trajectory.

    Args:
        rewards: total reward of each trajectory, n values.
        groups: which prompt each trajectory answers, n values.
        normalize: divide by the deviation of the baseline's rewards, where it is not 0.
        leave_one_out: a trajectory's own reward is no part of its baseline.

    Returns:
        n values. A trajectory without siblings has nothing to be compared with: 0.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) != len(groups):
        raise ValueError(f"{len(values)} rewards for {len(groups)} groups")
    members: dict[Hashable, list[int]] = defaultdict(list)
    for position, group in enumerate(groups):
        members[group].append(position)
    result = np.zeros_like(values)
    for positions in members.values():
        earned = values[positions]
        # Exactly zero, not rounding noise, so that the trainer can skip the group.
        if np.ptp(earned) > 0:
            result[positions] = [
                _advantage(earned, at, normalize, leave_one_out) for at in range(len(earned))
            ]
    return result


def _advantage(group: NDArray[np.float64], at: int, normalize: bool, leave_one_out: bool) -> float:
    """The advantage of one member of a group of at least two."""
    judges = np.delete(group, at) if leave_one_out else group
    centred = float(group[at] - judges.mean())
    # Judges that agree have no deviation to divide by; NeMo-RL leaves these undivided, too.
    if not normalize or len(judges) < 2 or np.ptp(judges) == 0:
        return centred
    return centred / (float(judges.std(ddof=1)) + _EPSILON)
