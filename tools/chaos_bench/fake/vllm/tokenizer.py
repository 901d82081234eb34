"""Tokens as text: each is its number in angle brackets, so that a text has one reading only."""

from __future__ import annotations

from collections.abc import Sequence


class Tokenizer:
    """`decode` is all that is asked of it."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f"<{token}>" for token in token_ids)
