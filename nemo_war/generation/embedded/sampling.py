"""Turns in vLLM's terms, and vLLM's outputs as answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nemo_war.generation.embedded.turn import Answer, Turn
from nemo_war.metadata import TurnMetadata

PROBE = {"prompt_token_ids": list(range(100, 164))}
"""Several blocks of a prompt that makes no sense, of tokens that any vocabulary has."""
_PROBE_LOGPROBS = 20
"""vLLM's own limit, by default."""


def prompt_of(turn: Turn, *, salted: bool) -> dict[str, Any]:
    """The engine's prompt. The salt makes KV of another policy epoch unreachable, whatever a reset did."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(turn.prompt)}
    if salted:
        prompt["cache_salt"] = f"epoch-{turn.metadata.epoch}"
    return prompt


def params_of(turn: Turn, temperature: float, stop_token_ids: Sequence[int]) -> Any:
    """`SamplingParams` of a turn; logprobs of the sampled tokens are always wanted by the trainer."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=temperature,
        max_tokens=turn.max_new_tokens,
        min_tokens=turn.min_new_tokens,
        ignore_eos=turn.ignore_eos,
        stop=list(turn.stop_strings),
        stop_token_ids=list(stop_token_ids),
        logprobs=0,
        extra_args=turn.metadata.to_extra_args(),
    )


def params_of_probe() -> Any:
    """`SamplingParams` of a self-check: the likeliest next tokens, and no place in any history."""
    from vllm import SamplingParams

    metadata = TurnMetadata("self-check", "self-check", learn=False)
    return SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=_PROBE_LOGPROBS, extra_args=metadata.to_extra_args()
    )


def answer_of(
    output: Any, first_token_s: float, epochs: tuple[int, int], decode: Callable[[list[int]], str]
) -> Answer:
    """Read the final `RequestOutput`.

    A stop string cuts vLLM's *text*; tokens of the same step after it stay in its
    token list when a draft was accepted across the string, so they are cut here.
    """
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    if isinstance(completion.stop_reason, str):
        tokens = tokens[: stop_length(tokens, completion.stop_reason, decode)]
    chosen = zip(tokens, completion.logprobs or (), strict=False)
    return Answer(
        tokens=tuple(tokens),
        logprobs=tuple(entry[token].logprob for token, entry in chosen),
        finish_reason=str(completion.finish_reason),
        cached_tokens=output.num_cached_tokens or 0,
        first_token_s=first_token_s,
        epochs=epochs,
    )


def stop_length(tokens: list[int], stop: str, decode: Callable[[list[int]], str]) -> int:
    """Fewest leading tokens whose text holds the stop string; all of them if none does.

    Text grows with tokens, so the place is found by bisection.
    """
    low, high = 0, len(tokens)
    if stop not in decode(tokens):
        return high
    while low < high:
        middle = (low + high) // 2
        if stop in decode(tokens[:middle]):
            high = middle
        else:
            low = middle + 1
    return low
