"""Logprobs of the generated tokens of padded trajectories, within bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

_CHUNK_TOKENS = 256
"""Positions whose logits exist at a time: 100 MB in float32 at SmolLM2's 49,152 words."""


@dataclass(frozen=True)
class Sample:
    """One finished trajectory.

    Attributes:
        token_ids: prompt, turns and observations in order.
        generated: True where the policy sampled the token; same length.
        logprobs: the rollout's logprob of each generated token, else 0; same length.
        reward: of the whole trajectory.
        group: siblings share it.
    """

    token_ids: list[int]
    generated: list[bool]
    logprobs: list[float]
    reward: float
    group: str

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.generated) == len(self.logprobs):
            raise ValueError(
                f"{len(self.token_ids)} token_ids, {len(self.generated)} generated and "
                f"{len(self.logprobs)} logprobs must be equally many"
            )
        if self.generated and self.generated[0]:
            raise ValueError("the first token has no context, it cannot have been generated")


@dataclass(frozen=True)
class Batch:
    """Trajectories padded to the longest, and where their n generated tokens are.

    Padding is on the right, where causal attention never looks, so that no mask is
    needed and attention takes its fast path.

    Attributes:
        token_ids: shape (rows, width).
        row: row of each generated token, shape (n,).
        column: its position in the trajectory, shape (n,).
        sample: its trajectory's position in the sequence given, shape (n,).
        rollout_logprobs: shape (n,), float32.
    """

    token_ids: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    sample: torch.Tensor
    rollout_logprobs: torch.Tensor


def batches(samples: Sequence[Sample], chosen: Iterable[int], size: int) -> Iterator[Batch]:
    """The chosen samples with something generated, in batches of similar length."""
    positions = [position for position in chosen if any(samples[position].generated)]
    positions.sort(key=lambda position: len(samples[position].token_ids))
    for start in range(0, len(positions), size):
        yield _padded(samples, positions[start : start + size])


def generated_logprobs(model: Any, batch: Batch, temperature: float) -> torch.Tensor:
    """Logprobs of the batch's generated tokens at a temperature, shape (n,), float32.

    Only hidden states before generated tokens reach the output embedding, and those in
    chunks whose logits are computed again in the backward pass: the logits of a whole
    batch would be larger than everything else.
    """
    hidden = model.base_model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
    hidden = hidden[batch.row, batch.column - 1].split(_CHUNK_TOKENS)
    targets = batch.token_ids[batch.row, batch.column].split(_CHUNK_TOKENS)
    head = model.get_output_embeddings()
    return torch.cat(
        [
            checkpoint(_chunk_logprobs, head, states, tokens, temperature, use_reentrant=False)
            for states, tokens in zip(hidden, targets, strict=True)
        ]
    )


def _chunk_logprobs(
    head: Any, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Logits are rounded to the head's precision first, as vLLM does, then float32."""
    return -torch.nn.functional.cross_entropy(head(hidden).float() / temperature, targets, reduction="none")


def _padded(samples: Sequence[Sample], positions: Sequence[int]) -> Batch:
    width = max(len(samples[position].token_ids) for position in positions)
    token_ids = torch.zeros(len(positions), width, dtype=torch.long)
    generated = torch.zeros(len(positions), width, dtype=torch.bool)
    logprobs = torch.zeros(len(positions), width)
    for row, position in enumerate(positions):
        sample, length = samples[position], len(samples[position].token_ids)
        token_ids[row, :length] = torch.tensor(sample.token_ids)
        generated[row, :length] = torch.tensor(sample.generated)
        logprobs[row, :length] = torch.tensor(sample.logprobs)
    row, column = generated.nonzero(as_tuple=True)
    return Batch(token_ids, row, column, torch.tensor(positions)[row], logprobs[row, column])
