"""CUDA graphs of an engine that drafts: which sizes are left of those that a recipe asks for.

With drafts a decoding request has 1 + max_draft_tokens tokens in a step, and vLLM captures graphs in
multiples of that: sizes are rounded up, and dropped where that is beyond the largest one asked for.
A step of more tokens than the largest graph runs without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_war.doctor.finding import Finding, fail, note, ok

_KEY = "policy.generation.vllm_kwargs.compilation_config.cudagraph_capture_sizes"
_FEW = 16
"""Requests. Rollouts run tens at a time on an engine; steps of more than the graphs hold go without."""
_LARGEST_BY_DEFAULT = 512
"""Tokens of vLLM's largest graph where no sizes are asked for, with room for enough requests."""
_WITHOUT_DECODING = ("NONE", "PIECEWISE")
"""Modes in which vLLM captures no graphs for decoding as such, and leaves sizes as they are."""


def left(sizes: Sequence[int], tokens: int, most: int | None = None) -> list[int]:
    """Sizes that vLLM captures.

    Args:
        sizes: those asked for.
        tokens: of a decoding request in a step, 1 + max_draft_tokens.
        most: tokens of a step, at most; null where vLLM chooses.
    """
    asked = [size for size in set(sizes) if most is None or size <= most]
    largest = max(asked, default=0)
    rounded = {-(-size // tokens) * tokens for size in asked}
    kept = sorted(size for size in rounded if size <= largest)
    return kept or ([tokens] if tokens <= largest else [])


def judge(generation: Mapping[str, Any], draft_tokens: int) -> Iterator[Finding]:
    """What a recipe's graphs will be, where it drafts."""
    kwargs = generation.get("vllm_kwargs") or {}
    compilation = kwargs.get("compilation_config") or {}
    tokens = 1 + draft_tokens
    if (generation.get("vllm_cfg") or {}).get("enforce_eager") or kwargs.get("enforce_eager"):
        yield note("CUDA graphs", "none, as enforce_eager is set", cuda_graph_sizes=[], cuda_graph_requests=0)
        return
    mode = str(compilation.get("cudagraph_mode"))
    if mode in _WITHOUT_DECODING:
        yield ok("CUDA graphs", f"cudagraph_mode is {mode}: sizes are taken as they are")
        return
    sizes = compilation.get("cudagraph_capture_sizes")
    if sizes is None:
        largest = compilation.get("max_cudagraph_capture_size") or _LARGEST_BY_DEFAULT
        yield ok(
            "CUDA graphs",
            f"vLLM's own sizes, up to {largest} tokens: {largest // tokens} requests in full draft",
            cuda_graph_requests=largest // tokens,
        )
        return
    yield _of_list(sizes, tokens, kwargs.get("max_num_batched_tokens"))


def _of_list(sizes: Sequence[int], tokens: int, most: int | None) -> Finding:
    kept = left(sizes, tokens, most)
    if not kept:
        return fail(
            "CUDA graphs",
            f"{_KEY} ends at {max(sizes, default=0)}, and a request with drafts has {tokens} tokens: "
            "vLLM does not start",
            f"set {_KEY}={_example(tokens)}",
            cuda_graph_sizes=[],
            cuda_graph_requests=0,
        )
    requests = kept[-1] // tokens
    facts = {"cuda_graph_sizes": kept, "cuda_graph_requests": requests}
    says = (
        f"{len(kept)} of {len(sizes)} sizes left, up to {kept[-1]} tokens: {requests} requests in full draft"
    )
    if requests < _FEW:
        return note("CUDA graphs", says, f"set {_KEY}={_example(tokens)}", **facts)
    if set(kept) != set(sizes):
        return note("CUDA graphs", f"{says}; the others are no multiples of {tokens}", None, **facts)
    return ok("CUDA graphs", says, **facts)


def _example(tokens: int) -> str:
    """Sizes for up to 32 requests."""
    return f"[{','.join(str(tokens * requests) for requests in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32))}]"
