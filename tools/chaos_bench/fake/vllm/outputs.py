"""What `AsyncLLM.generate` yields."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.logprobs import Logprob


@dataclass
class CompletionOutput:
    """The one completion of a request; its lists grow while it is generated."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A request, as far as it is generated."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
