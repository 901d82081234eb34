"""Whose turns the prompts of one process are: NeMo-RL passes tokens, and no names.

The tokens of a later turn begin with all of the turn before it, answer included, exactly; so
each is recognised by what it continues. First turns with one prompt are siblings.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

import numpy as np

from nemo_war.metadata import TurnMetadata
from nemo_war.routing.http.prompt import BLOCK, Prompt, Tokens
from nemo_war.routing.http.trajectories import Trajectories

_IDLE_S = 3600.0
"""A trajectory that asks for nothing for so long is over; NeMo-RL never says that one is."""
_MOST = 65_536
"""Trajectories remembered."""


@dataclass(slots=True)
class Turn:
    """A turn under way.

    Attributes:
        metadata: whose turn it is.
        replica: where it goes; None where NeMo-RL chooses.
        answer: int32[n], whole text in tokens; None until it is there, or where it failed.
        generated: of these, how many are new.
        cached_tokens: of the prompt, those whose KV was there; None where that is not known.
    """

    metadata: TurnMetadata
    replica: int | None = None
    answer: np.ndarray | None = None
    generated: int = 0
    cached_tokens: int | None = None


class Turns:
    """The trajectories of one process. All methods may be called from any thread."""

    def __init__(self, ended: Callable[[str], None]) -> None:
        """Know none; `ended` is told of each that is over."""
        self._process = uuid4().hex[:8]  # its names must not be those of another process
        self._lock = threading.Lock()
        self._trajectories = Trajectories(_IDLE_S, _MOST, self._ended)
        self._homes: dict[str, int] = {}
        self._tell = ended

    def begin(self, prompt: np.ndarray, learn: bool) -> Turn:
        """A turn begins; `finish` it.

        Args:
            prompt: int32[n], all of it.
            learn: whether it may enter the history.
        """
        with self._lock:
            self._trajectories.expire(time.monotonic())
            begun = self._trajectories.begin(Prompt(tokens=Tokens(prompt, whole=True)))
        name = f"{self._process}/{begun.trajectory}"
        return Turn(TurnMetadata(name, begun.group, begun.turn, learn=learn))

    def finish(self, turn: Turn) -> None:
        """It is over, however it ended."""
        name = self._own(turn.metadata.trajectory)
        with self._lock:
            if turn.answer is not None:
                if turn.replica is not None:
                    self._homes[name] = turn.replica
                if len(turn.answer) >= BLOCK:  # a shorter one cannot be told from others
                    self._trajectories.stands(name, [Tokens(turn.answer).mark()])
            self._trajectories.finish(name, time.monotonic())

    def home(self, trajectory: str) -> int | None:
        """The replica that served it last; None at its first turn."""
        with self._lock:
            return self._homes.get(self._own(trajectory))

    def _own(self, trajectory: str) -> str:
        return trajectory.removeprefix(f"{self._process}/")

    def _ended(self, name: str) -> None:
        self._homes.pop(name, None)
        self._tell(f"{self._process}/{name}")
