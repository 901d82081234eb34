"""When a replica is given work: a state machine of two states.

Healthy once it answers; lost when it refuses a connection, or fails twice in a row. A
single failure may be one bad moment; who refuses is not there.
"""

from __future__ import annotations

_PATIENCE = 2


class Health:
    """What is known of one replica's health. It is not healthy until it has answered."""

    def __init__(self) -> None:
        self.healthy = False
        self._failures = 0

    def answered(self) -> bool:
        """It answered; whether it has come (back) by that."""
        came, self.healthy, self._failures = not self.healthy, True, 0
        return came

    def failed(self, *, refused: bool) -> bool:
        """It did not answer, or refused the connection; whether it is lost by that."""
        self._failures = _PATIENCE if refused else self._failures + 1
        lost = self.healthy and self._failures >= _PATIENCE
        self.healthy = self.healthy and not lost
        return lost
