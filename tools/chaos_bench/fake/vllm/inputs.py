"""What a prompt may be."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class TokensPrompt(TypedDict):
    """Tokens; requests with another salt share no KV with it."""

    prompt_token_ids: list[int]
    cache_salt: NotRequired[str]
