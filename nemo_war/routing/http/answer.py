"""What a router needs of a replica's answer: its message, its tokens, its counts.

Of several choices the first is followed. Whatever cannot be read is left out: the answer
has gone to the client as it is, and all that is lost is knowing the trajectory again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nemo_war.routing.facts import Outcome

_MOST_COUNTED = 1 << 31
"""More tokens than any answer has; JSON's numbers have no end, and not all of them are floats' as well."""


class Answer:
    """An answer being read, whole or as a stream of events.

    Attributes:
        complete: all of it was read.
        error: status of an error told in its place, or in place of its rest; 0 while there is none.
    """

    def __init__(self, on_complete: Callable[[Answer], None] = lambda answer: None) -> None:
        """Nothing is read yet; `on_complete` is told once, when all is."""
        self.complete, self.error = False, 0
        self._on_complete = on_complete
        self._text: list[str] = []
        self._calls: dict[int, dict[str, str]] = {}
        self._prompt_ids: np.ndarray | None = None
        self._ids: list[np.ndarray] = []
        self._deltas = 0
        self._usage: Mapping[str, Any] = {}

    def read(self, body: bytes) -> None:
        """Take a whole answer."""
        self._take(body)
        self.end()

    def feed(self, lines: bytes) -> None:
        """Take whole lines of an event stream."""
        for line in lines.split(b"\n"):
            if line.startswith(b"data: [DONE]"):
                self.end()
            elif line.startswith(b"data:"):
                self._take(line[5:])

    def end(self) -> None:
        """There is no more to come; what held no choice, or an error, was no answer."""
        if self._deltas and not self.error and not self.complete:
            self.complete = True
            self._on_complete(self)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt as the replica counted it; 0 where it does not say."""
        return _count(self._usage.get("prompt_tokens")) or 0

    def message(self) -> dict[str, Any]:
        """The assistant's message, as the client will send it back."""
        calls = [
            {"id": call["id"], "function": {"name": call["name"], "arguments": call["arguments"]}}
            for _, call in sorted(self._calls.items())
        ]
        return {"role": "assistant", "content": "".join(self._text), "tool_calls": calls}

    def tokens(self, prompt: np.ndarray | None) -> np.ndarray | None:
        """Prompt and answer in tokens, as far as known; `prompt` where the answer does not repeat it."""
        prompt = self._prompt_ids if self._prompt_ids is not None else prompt
        return None if prompt is None else np.concatenate((prompt, *self._ids))

    def outcome(self) -> Outcome | None:
        """What became of the turn; None unless it was answered in full."""
        if not self.complete:
            return None
        known = sum(map(len, self._ids)) or self._deltas
        details = self._usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
        output = _count(self._usage.get("completion_tokens"))
        return Outcome(known if output is None else output, _count(cached))

    def _take(self, text: bytes) -> None:
        try:
            part = json.loads(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(part, Mapping):
            return
        if isinstance(part.get("usage"), Mapping):
            self._usage = part["usage"]
        if isinstance(part.get("error"), Mapping):
            self.error = _count(part["error"].get("code")) or 500
        choices = part.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, Mapping) and not choice.get("index"):
                self._take_choice(part, choice)

    def _take_choice(self, part: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
        message = choice.get("message") or choice.get("delta")
        message = message if isinstance(message, Mapping) else {"content": choice.get("text")}
        self._deltas += 1
        if isinstance(message.get("content"), str):
            self._text.append(message["content"])
        calls = message.get("tool_calls")
        for place, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, Mapping):
                self._take_call(place, call)
        # NeMo-RL tells tokens with the message, vLLM with the choice (completions) or at the top (chat).
        for holder in (message, choice, part):
            if self._prompt_ids is None:
                self._prompt_ids = token_ids(holder.get("prompt_token_ids"))
        generated = token_ids(message.get("generation_token_ids") or choice.get("token_ids"))
        if generated is not None:
            self._ids.append(generated)

    def _take_call(self, place: int, call: Mapping[str, Any]) -> None:
        """Add a tool call, or the next piece of one: its name comes once, its arguments bit by bit."""
        index = call.get("index")
        known = self._calls.setdefault(
            index if isinstance(index, int) else place, {"id": "", "name": "", "arguments": ""}
        )
        function = call.get("function")
        pieces = {"id": call.get("id"), **(function if isinstance(function, Mapping) else {})}
        for name in known:
            if isinstance(pieces.get(name), str):
                known[name] += pieces[name]


def token_ids(value: Any) -> np.ndarray | None:
    """A JSON list of token ids as int32[n], n > 0; None where it is not one."""
    if not isinstance(value, list) or not value or type(value[0]) is not int:
        return None
    try:
        ids = np.array(value, dtype=np.int32)
    except (ValueError, TypeError, OverflowError):
        return None
    return ids if ids.ndim == 1 else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _MOST_COUNTED else None
