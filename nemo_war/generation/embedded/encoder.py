"""Text to tokens for recordings, with the tokenizer loaded when the first text comes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from nemo_war.errors import UserError
from nemo_war.generation.embedded import model
from nemo_war.telemetry.progress import stage


def encoder(folder: Path | None) -> Callable[[str], list[int]]:
    """A function from text to token ids, without special tokens.

    Args:
        folder: of the tokenizer; None for the bundled model's.
    """

    @cache
    def tokenizer() -> Any:
        from transformers import AutoTokenizer

        source = folder or model.resolve(model.BUNDLED, stage)
        stage("reading and tokenising the recordings")
        try:
            return AutoTokenizer.from_pretrained(str(source), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"--tokenizer {source}: {reason}; name the folder of a tokenizer") from None

    return lambda text: tokenizer().encode(text, add_special_tokens=False)
