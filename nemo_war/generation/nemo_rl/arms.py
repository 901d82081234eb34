"""In-job A/B: WAR is switched off and on again, so that an operator sees in one job what it is worth.

Which arm a step belongs to follows from its policy epoch, as each step has one of its own.
So the processes of a job agree without telling each other.
"""

from __future__ import annotations


def is_on(epoch: int, every: int | None) -> bool:
    """Whether WAR drafts and places turns in this policy epoch.

    Args:
        epoch: policy epoch.
        every: steps of an arm; the first arm has WAR. None: always on.
    """
    return every is None or (epoch // every) % 2 == 0
