"""What goes along with a call of a worker: whose turns its requests are, and back, what became of them.

NeMo-RL's methods between a worker's caller and its engine know nothing of either. So both
are on an object that the context of the call holds, which tasks it starts share.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from nemo_war.metadata import TurnMetadata


class Served(NamedTuple):
    """What became of a request.

    Attributes:
        began: policy epoch that it began under.
        ended: policy epoch that it ended under.
        cached_tokens: those of its prompt whose KV was there.
    """

    began: int
    ended: int
    cached_tokens: int


@dataclass(slots=True)
class Call:
    """A call that sends one request or a batch of them.

    Attributes:
        turns: whose they are; None where nobody said.
        served: what became of them, in the same order.
    """

    turns: Sequence[TurnMetadata] | None = None
    served: list[Served] = field(default_factory=list)


CALL: ContextVar[Call | None] = ContextVar("nemo_war_call", default=None)
"""The call that this task or thread carries out."""
