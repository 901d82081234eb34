"""How a request is sampled."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from vllm.exceptions import VLLMValidationError


class RequestOutputKind(Enum):
    """What each output holds: all so far, or nothing before the end."""

    CUMULATIVE = 0
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    """The parameters that an embedded replica sets; any other is refused.

    `temperature` changes nothing: at every temperature the seed decides.
    """

    n: int = 1
    temperature: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: dict[str, Any] | None = None
    eos_token_id: int | None = field(default=None, init=False)
    all_stop_token_ids: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids or ()))
        self.all_stop_token_ids = set(self.stop_token_ids)
        if self.n != 1:
            raise VLLMValidationError(f"this engine generates one completion of a request, not n={self.n}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise VLLMValidationError(f"max_tokens must be at least 1, got {self.max_tokens}.")
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            raise VLLMValidationError(
                f"min_tokens must be between 0 and max_tokens={self.max_tokens}, got {self.min_tokens}."
            )

    def of_engine(self, end: int, room: int) -> SamplingParams:
        """A copy that knows the model's end-of-sequence token and how many tokens there is room for."""
        mine = copy(self)
        mine.max_tokens = room if self.max_tokens is None else self.max_tokens
        mine.eos_token_id = None if self.ignore_eos else end
        mine.all_stop_token_ids = self.all_stop_token_ids | {end}
        return mine
