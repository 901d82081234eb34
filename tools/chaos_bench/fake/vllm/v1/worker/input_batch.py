"""The rows of a step, which a drafter reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from tools.chaos_bench.model import Context
from vllm.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class CachedRequestState:
    """What the worker knows of a request until it is told that it is over, preempted or not."""

    req_id: str
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: str
    tokens: list[int]
    context: Context

    def append(self, token: int) -> None:
        """A token was sampled."""
        self.tokens.append(token)
        self.context.extend((token,))


class InputBatch:
    """The requests of a step, a row for each.

    As in vLLM a new request takes the first row that is free, and rows that are left empty are filled from
    the end, so that requests change places.

    Attributes:
        req_ids: of the rows.
        spec_token_ids: per row, the draft that this step verifies.
        num_tokens_no_spec: int32[max_num_seqs], tokens of each row.
        token_ids_cpu: int32[max_num_seqs, max_model_len], the tokens.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.req_ids: list[str] = []
        self.spec_token_ids: list[list[int]] = []
        self.num_tokens_no_spec = np.zeros(max_num_seqs, np.int32)
        self.token_ids_cpu = np.zeros((max_num_seqs, max_model_len), np.int32)

    def replace(self, kept: Collection[str], new: Sequence[CachedRequestState]) -> None:
        """Drop all rows but those kept, and add some."""
        holes = [row for row, name in enumerate(self.req_ids) if name not in kept]
        for state in new:
            if holes:
                row = holes.pop(0)
            else:
                row = len(self.req_ids)
                self.req_ids.append("")
                self.spec_token_ids.append([])
            self.req_ids[row] = state.req_id
            self.num_tokens_no_spec[row] = 0
            self.append(row, state.tokens)
        while holes:
            last = len(self.req_ids) - 1
            if holes[-1] == last:
                holes.pop()
            else:
                self._move(last, holes.pop(0))
            self.req_ids.pop()
            self.spec_token_ids.pop()

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Add tokens to the end of a row."""
        start = int(self.num_tokens_no_spec[row])
        self.token_ids_cpu[row, start : start + len(tokens)] = tokens
        self.num_tokens_no_spec[row] += len(tokens)

    def _move(self, source: int, target: int) -> None:
        length = int(self.num_tokens_no_spec[source])
        self.req_ids[target] = self.req_ids[source]
        self.num_tokens_no_spec[target] = length
        self.token_ids_cpu[target, :length] = self.token_ids_cpu[source, :length]
