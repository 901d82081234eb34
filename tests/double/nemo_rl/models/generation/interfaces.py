from __future__ import annotations

from typing import Any, NotRequired, TypedDict

import torch


class GenerationConfig(TypedDict):
    backend: str
    max_new_tokens: int


class GenerationDatumSpec(TypedDict):
    input_ids: torch.Tensor
    input_lengths: torch.Tensor
    stop_strings: NotRequired[list[str]]


class GenerationOutputSpec(TypedDict):
    output_ids: torch.Tensor
    generation_lengths: torch.Tensor
    unpadded_sequence_lengths: torch.Tensor
    logprobs: torch.Tensor
    truncated: NotRequired[torch.Tensor]


def verify_right_padding(data: Any, pad_value: int = 0, raise_error: bool = True) -> tuple[bool, str | None]:
    asked = "input_ids" in data
    rows = data["input_ids" if asked else "output_ids"]
    lengths = data["input_lengths" if asked else "unpadded_sequence_lengths"]
    for row, length in zip(rows, lengths, strict=True):
        if (row[length:] != pad_value).any():
            if raise_error:
                raise ValueError("not right-padded")
            return False, "not right-padded"
    return True, None
