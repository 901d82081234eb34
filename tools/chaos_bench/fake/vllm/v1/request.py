"""A request, as the scheduler sees it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from enum import Enum, auto
from typing import TYPE_CHECKING

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import KVCacheBlock


class RequestStatus(Enum):
    """Where it is; a preempted one waits, too."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class Request:
    """A prompt and what was generated so far.

    Attributes:
        request_id: unique in this engine.
        seed: tells its text from that of its siblings.
        params: as a client gave them, and what the engine adds.
        num_prompt_tokens: how many of `tokens` are the prompt.
        tokens: prompt and output.
        spec_token_ids: draft for its next step.
        num_computed_tokens: leading tokens with KV, those of the step that is under way included.
        blocks: its KV, while it runs.
        block_hashes: names of its full blocks.
        num_cached_tokens: prompt tokens found in the cache when it was first let in.
        stop_reason: the stop token that ended it.
    """

    def __init__(
        self,
        request_id: str,
        seed: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        cache_salt: str | None,
        block_size: int,
    ) -> None:
        self.request_id, self.seed, self.params = request_id, seed, params
        self.num_prompt_tokens = len(prompt_token_ids)
        self.tokens: list[int] = []
        self.spec_token_ids: list[int] = []
        self.num_computed_tokens = 0
        self.blocks: list[KVCacheBlock] = []
        self.block_hashes: list[bytes] = []
        self.num_cached_tokens: int | None = None
        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None
        self._salt, self._block_size = (cache_salt or "").encode(), block_size
        self.append(prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated."""
        return len(self.tokens) - self.num_prompt_tokens

    def append(self, tokens: Iterable[int]) -> None:
        """Add tokens, and name the blocks they fill; a name depends on all up to there and on the salt."""
        self.tokens += tokens
        size = self._block_size
        while len(self.block_hashes) < len(self.tokens) // size:
            start = len(self.block_hashes) * size
            before = self.block_hashes[-1] if self.block_hashes else self._salt
            block = struct.pack(f"<{size}i", *self.tokens[start : start + size])
            self.block_hashes.append(hashlib.blake2b(before + b"\0" + block, digest_size=16).digest())


def checked_prompt(prompt: object, max_model_len: int) -> tuple[list[int], str | None]:
    """The tokens and the salt of a prompt.

    Raises:
        VLLMValidationError: it is not made of tokens, or leaves no room for another one.
    """
    if not isinstance(prompt, dict) or "prompt_token_ids" not in prompt:
        raise VLLMValidationError("this engine takes prompts of tokens: {'prompt_token_ids': [...]}")
    tokens = list(prompt["prompt_token_ids"])
    if not tokens:
        raise VLLMValidationError("The decoder prompt cannot be empty")
    if len(tokens) >= max_model_len:
        raise VLLMValidationError(
            f"The decoder prompt (length {len(tokens)}) plus the number of requested output tokens "
            f"(at least 1) is longer than the maximum model length of {max_model_len}."
        )
    return tokens, prompt.get("cache_salt")
