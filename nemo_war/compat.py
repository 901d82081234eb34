"""Workarounds for defects of other packages, and nothing else.

Each entry says what a user would see without it, where it was reported, which
versions have it, and how a test notices that it is no longer needed. All of them may
be applied any number of times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CPU_EXPANSION = "vllm-cpu-expand-batch-to-tokens"


def apply_to_engine() -> tuple[str, ...]:
    """Close the known defects of this process's vLLM; call it where drafts are verified.

    Returns:
        Names of the workarounds now in force.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return ()
    return (CPU_EXPANSION,) if _replace_cpu_expansion() else ()


def _replace_cpu_expansion() -> bool:
    """vLLM's CPU build samples garbage under speculation at temperature > 0.

    Symptom: fluent text without drafts, noise with them; greedy decoding hides it.
    Cause: `cpu_triton_utils._expand_kernel_impl` writes into an int64 *copy* of its
    output, so that temperature, top-k and top-p of the draft positions stay
    uninitialised memory. Versions: seen in 0.28.0, read the same up to 0.32.0.
    Upstream: vllm-project/vllm pull 42638 (closed unmerged).
    No longer needed when: `expansion_is_broken()` is false without it.
    """
    from vllm.v1.sample import rejection_sampler

    current = rejection_sampler.expand_batch_to_tokens
    if getattr(current, "nemo_war", False):
        return True
    if not expansion_is_broken(current):
        return False
    expand_batch_to_tokens.replaces = current  # type: ignore[attr-defined]
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    return True


def refresh_tied_head(model: Any) -> bool:
    """vLLM's CPU build keeps the old output head of a tied model when weights are reloaded.

    Symptom: after a refit, logprobs are neither the old policy's nor the new one's.
    Cause: `reload_weights` re-runs the post-processing of layers that got weights. A
    tied head gets none of its own ("ParallelLMHead: Failed to load weights"), and on the
    CPU it computes with a repacked copy made at start; on a GPU it shares the
    embedding's storage. Versions: seen in 0.28.0. Upstream: not reported yet.
    No longer needed when: the engine test of freshness passes without it.

    Args:
        model: the runner's model, just reloaded.

    Returns:
        Whether a head was repacked.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or not getattr(model.config, "tie_word_embeddings", False):
        return False
    heads = [layer for layer in model.modules() if isinstance(layer, ParallelLMHead)]
    for head in heads:
        head.quant_method.process_weights_after_loading(head)
    return bool(heads)


def expansion_is_broken(expand: Callable[..., Any]) -> bool:
    """Whether vLLM's `expand_batch_to_tokens` loses its result for float inputs.

    The kernel it calls is put in place by the CPU model runner; before that the name
    is a Triton placeholder, so the CPU kernel is called by hand here.
    """
    import torch
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    before = rejection_sampler.expand_kernel
    rejection_sampler.expand_kernel = cpu_triton_utils.expand_kernel
    try:
        for value in (0.5, 3.25):  # twice: uninitialised memory may hold the right value once
            got = expand(torch.tensor([value, value]), torch.tensor([1, 3], dtype=torch.int32), 3)
            if not torch.equal(got, torch.full((3,), value)):
                return True
        return False
    finally:
        rejection_sampler.expand_kernel = before


def expand_batch_to_tokens(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    """Repeat each row's value for each of its tokens, as vLLM's function of this name says it does.

    Args:
        x: [batch] values.
        cu_num_tokens: [batch] cumulative token counts.
        num_tokens: total number of tokens.
        replace_from: value to be replaced in the result.
        replace_to: what replaces it.

    Returns:
        [num_tokens] tensor of x's dtype.
    """
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).to(torch.int64)
    expanded = torch.repeat_interleave(x, counts, output_size=num_tokens)
    if replace_from != replace_to:
        expanded = torch.where(expanded == replace_from, expanded.new_tensor(replace_to), expanded)
    return expanded


expand_batch_to_tokens.nemo_war = True  # type: ignore[attr-defined]
