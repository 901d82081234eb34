"""Messages as tokens: each message is tokenised once, and what was generated is never touched.

A re-tokenised history could differ from what the policy sampled; then the trainer's
logprobs would belong to other tokens, and the prefix cache would miss.
"""

from __future__ import annotations

from typing import Any

from nemo_war.errors import UserError
from nemo_war.generation.embedded.environments.interface import Message, MessageLog

_MARK = "@@assistant-turn@@"


class Chat:
    """A tokenizer with its chat template, in terms of a growing token history."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise UserError(
                f"the tokenizer of {tokenizer.name_or_path} has no chat template, and turns need one: "
                "use an instruction-tuned model, or set policy.tokenizer.name to a folder with a template"
            )
        self._tokenizer = tokenizer
        self.eos: int = tokenizer.eos_token_id

    def prompt(self, messages: MessageLog) -> list[int]:
        """Tokens of a conversation up to where the assistant speaks."""
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.encode(text)

    def observation(self, message: Message, *, after_eos: bool) -> list[int]:
        """Tokens that go between an assistant turn and the next one.

        The template is asked for a conversation with a marked assistant turn; what it
        writes after the mark is what belongs after any assistant turn.

        Args:
            message: the environment's message.
            after_eos: whether the turn's last token already is the end-of-sequence token.
        """
        conversation = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK}, message]
        text = self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        text = text.split(_MARK, 1)[1]
        return self.encode(text.removeprefix(self._tokenizer.eos_token) if after_eos else text)

    def text(self, tokens: list[int]) -> str:
        """What an environment reads: special tokens left out."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text as it stands, special tokens written out in it included."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
