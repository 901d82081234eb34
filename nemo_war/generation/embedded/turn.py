"""One engine request and its answer, as they cross the process boundary."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_war.metadata import TurnMetadata


@dataclass(frozen=True, slots=True)
class Turn:
    """What a replica is asked to generate.

    Attributes:
        prompt: the exact token history, never re-tokenised.
        metadata: who asks.
        max_new_tokens: most tokens to generate.
        min_new_tokens: with `max_new_tokens`, fixes the length of replayed work.
        ignore_eos: whether to go on past the end-of-sequence token.
        stop_strings: texts that end the turn.
    """

    prompt: tuple[int, ...]
    metadata: TurnMetadata
    max_new_tokens: int
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    Attributes:
        tokens: generated token ids, the stop token included, nothing after a stop string.
        logprobs: the policy's logprob of each of them.
        finish_reason: `stop` or `length`; `abort` where it was taken back for a refit.
        cached_tokens: prompt tokens whose KV came from the prefix cache.
        first_token_s: seconds from arrival at the replica to the first token.
        epochs: policy epochs of the replica when the turn began and when it ended.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    cached_tokens: int
    first_token_s: float
    epochs: tuple[int, int]
