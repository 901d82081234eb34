"""What a request asks a model to continue, and how it is known again a turn later.

A trajectory's next turn begins with all of the last one: its prompt, the answer, then
something new. Where token ids are given the beginning is compared in tokens, else in
messages. Either is a hash; where a trajectory stands is a `Mark`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128

from nemo_war.routing.http.answer import Answer, token_ids

BLOCK = 16
"""Tokens between two looks for a known beginning; an engine reuses no KV below its block of 16."""
_PIECE = 4
"""Bytes of an int32."""
_ROW = 16
"""Pieces after which a stride that is not whole is made up for."""


class Mark(NamedTuple):
    """Where a trajectory stands after its last turn.

    Attributes:
        key: hash of its messages; of tokens, of its full blocks.
        length: in tokens; 0 for messages.
        digest: of all its tokens; 0 for messages.
    """

    key: str | int
    length: int = 0
    digest: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as far as a router can know it.

    Attributes:
        conversation: its messages; None where it is not a chat.
        tokens: its beginning (or all of it) in tokens; None where those are not given.
        text_bytes: size of a prompt that is neither.
        text: hash of such a prompt.
    """

    conversation: Conversation | None = None
    tokens: Tokens | None = None
    text_bytes: int = 0
    text: str = ""

    def beginning(self, length: int, stride: float) -> np.ndarray | None:
        """int32[n], its tokens as far as they are known; of a chat without any, pieces of its text instead.

        Prompts with a common beginning have one in such pieces too, which is all that placement
        needs of tokens.

        Args:
            length: most pieces of text.
            stride: bytes from one piece to the next.
        """
        if self.tokens is not None:
            return self.tokens.ids
        return self.conversation.pieces(length, stride) if self.conversation is not None else None

    @property
    def size(self) -> int:
        """Bytes of all of its text, in UTF-8."""
        return self.conversation.size if self.conversation is not None else self.text_bytes

    @property
    def rest(self) -> int:
        """Of these, what follows the tokens that are given."""
        return self.conversation.new_size if self.conversation is not None else 0

    @property
    def group(self) -> str:
        """Name for all trajectories that begin with the same prompt."""
        if self.conversation is not None:
            return self.conversation.opening
        return f"{self.tokens.digest(len(self.tokens.ids)):016x}" if self.tokens is not None else self.text

    def beginnings(self) -> Iterator[str | int]:
        """Keys of marks that this prompt may continue, longest first."""
        if self.tokens is not None:
            yield from reversed(self.tokens.keys)
        if self.conversation is not None:
            yield from reversed(self.conversation.keys)

    def continues(self, mark: Mark) -> bool:
        """Whether a mark found under one of the keys is of this prompt's beginning."""
        return mark.length == 0 or (self.tokens is not None and self.tokens.continues(mark))

    def after(self, answer: Answer) -> list[Mark]:
        """Where the trajectory stands once it has this answer."""
        marks = []
        ids = answer.tokens(self.tokens.ids if self.tokens is not None and self.tokens.whole else None)
        if ids is not None and len(ids) >= BLOCK:
            marks.append(Tokens(ids).mark())
        if self.conversation is not None:
            marks.append(self.conversation.after(answer.message()))
        return marks


class Tokens:
    """The beginning of a prompt in tokens."""

    def __init__(self, ids: np.ndarray, whole: bool = False) -> None:
        """Hash it.

        Args:
            ids: int32[n].
            whole: nothing follows it in the prompt.
        """
        self.ids, self.whole = ids, whole
        self._view = ids.data
        self._digests: dict[int, int] = {}
        self.keys = self._block_keys()

    def digest(self, length: int) -> int:
        """Hash of the first `length` tokens."""
        if length not in self._digests:
            self._digests[length] = xxh3_64_intdigest(self._view[:length])
        return self._digests[length]

    def continues(self, mark: Mark) -> bool:
        """Whether it begins with the mark's tokens, and goes on: the same prompt again is a sibling's."""
        return mark.length + self.whole <= len(self.ids) and self.digest(mark.length) == mark.digest

    def mark(self) -> Mark:
        """A trajectory that stands at the end of it, which is a block away from its beginning or more."""
        return Mark(self.keys[-1], len(self.ids), self.digest(len(self.ids)))

    def _block_keys(self) -> list[int]:
        hashed, keys = xxh3_128(), []
        for start, end in pairwise(range(0, len(self.ids) + 1, BLOCK)):
            hashed.update(self._view[start:end])
            keys.append(hashed.intdigest())
        return keys


class Conversation:
    """The messages of a chat, hashed one after the other."""

    def __init__(self, messages: Sequence[Any], tools: Any = None) -> None:
        """Read messages, whatever they are: to refuse what is malformed is for the replica.

        Args:
            messages: of the request.
            tools: what the request offers; they are part of every prompt, which begins with them.
        """
        self._hash = xxh3_128()
        self.keys: list[str] = []
        self.opening = ""
        self._texts = [_bytes(json.dumps(tools, ensure_ascii=False))] if tools else []
        self.size = sum(map(len, self._texts))
        self.new_size = 0
        self.media: list[str] = []
        for message in messages:
            fields = message if isinstance(message, Mapping) else {"content": message}
            answer = fields.get("role") == "assistant"
            if answer and not self.opening:
                self.opening = self._hash.hexdigest()
            self._add(fields)
            if answer:
                self.keys.append(self._hash.hexdigest())
                self.new_size = 0
        self.opening = self.opening or self._hash.hexdigest()

    def after(self, message: Mapping[str, Any]) -> Mark:
        """Where it stands with this message, which is text, added."""
        hashed = self._hash.copy()
        hashed.update(_bytes(_canonical(message, [])))
        return Mark(hashed.hexdigest())

    def pieces(self, most: int, stride: float) -> np.ndarray:
        """int32[n <= most], four bytes of the text in every `stride`; the last few may lack."""
        text = b"".join(self._texts)
        # A row of pieces has whole bytes between them, and the fraction at its end: copied without an index.
        step, row = int(stride), round(_ROW * stride)
        rows = max(0, (len(text) - (_ROW - 1) * step - _PIECE) // row + 1)
        return np.ndarray((rows, _ROW), np.int32, text, strides=(row, step)).ravel()[:most]

    def _add(self, message: Mapping[str, Any]) -> None:
        media: list[str] = []
        canonical = _canonical(message, media)
        text = _bytes(canonical)
        self._texts.append(text)
        self._hash.update(text)
        self._hash.update(_bytes("".join(media)))
        self.media += media
        self.size += len(text)
        self.new_size += len(text)


def read_prompt(fields: Mapping[str, Any]) -> Prompt:
    """The prompt of a request body; an empty one where it has none that is understood."""
    messages, prompt = fields.get("messages"), fields.get("prompt")
    if isinstance(messages, list):
        beginning = _beginning(fields, messages)
        conversation = Conversation(messages, fields.get("tools"))
        return Prompt(conversation, None if beginning is None else Tokens(beginning))
    ids = token_ids(prompt)
    if ids is not None:
        return Prompt(tokens=Tokens(ids, whole=True))
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    encoded = _bytes(text)
    return Prompt(text_bytes=len(encoded), text=xxh3_128(encoded).hexdigest())


def variant(fields: Mapping[str, Any], prompt: Prompt) -> str:
    """What else the KV depends on: the adapter, which vLLM names as a model, the salt, images and sounds."""
    parts = [str(fields.get(name) or "") for name in ("model", "cache_salt")]
    if prompt.conversation is not None and prompt.conversation.media:
        parts.append(xxh3_128(_bytes("".join(prompt.conversation.media))).hexdigest())
    return "/".join(parts)


def _beginning(fields: Mapping[str, Any], messages: Sequence[Any]) -> np.ndarray | None:
    """Tokens that the prompt must begin with: given outright, or as NeMo-Gym does, with the last answer."""
    required = token_ids(fields.get("required_prefix_token_ids"))
    if required is not None:
        return required
    for message in reversed(messages):
        if isinstance(message, Mapping) and "prompt_token_ids" in message:
            prompt, generated = (
                token_ids(message.get(name)) for name in ("prompt_token_ids", "generation_token_ids")
            )
            return None if prompt is None or generated is None else np.concatenate((prompt, generated))
    return None


def _canonical(message: Mapping[str, Any], media: list[str]) -> str:
    """A message as clients send it back, without what they may add, drop or reformat.

    Args:
        message: of any role.
        media: takes the parts of its content that are not text.
    """
    text = _text(message.get("content"), media)
    calls = message.get("tool_calls")
    named = [_call(call) for call in calls] if isinstance(calls, list) else []
    return json.dumps([message.get("role"), text, named], ensure_ascii=False)


def _call(call: Any) -> list[Any]:
    fields = call if isinstance(call, Mapping) else {}
    function = fields.get("function")
    function = function if isinstance(function, Mapping) else {}
    return [fields.get("id"), function.get("name"), function.get("arguments")]


def _text(content: Any, media: list[str]) -> str:
    """The text of a message's content; parts that are not text go to `media`."""
    if not isinstance(content, list):
        return content.strip() if isinstance(content, str) else json.dumps(content) if content else ""
    texts = []
    for part in content:
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            media.append(json.dumps(part, sort_keys=True))
    return "".join(texts).strip()


def _bytes(text: str) -> bytes:
    """UTF-8; of half a character, which JSON can hold, as well."""
    return text.encode("utf-8", "surrogatepass")
