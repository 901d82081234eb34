"""What placement learned, as a file of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from nemo_war import snapshot
from nemo_war.routing.policy import Policy
from nemo_war.snapshot import State


def write(path: Path, state: State | None) -> None:
    """Write what a policy learned, if anything.

    Raises:
        OSError: it could not be written.
    """
    if state is not None:
        snapshot.write(path, state)


def read(path: Path, policy: Policy) -> None:
    """Let a policy go on with what `write` wrote, if it wrote anything.

    Raises:
        UserError: the file is damaged, or makes no sense to this policy.
    """
    if not path.exists():
        return
    state = snapshot.read(path)
    try:
        policy.restore(state)
    except ValueError as error:
        raise snapshot.KIND.malformed(path, error) from None
