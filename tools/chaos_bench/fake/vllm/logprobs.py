"""Logprobs of sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Logprob:
    """Of one token at one place."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
