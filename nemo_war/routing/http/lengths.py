"""How long prompts are that are known as text, in tokens: learned from what replicas count.

Every answer's `usage` tells how many tokens its prompt was. A trajectory's next prompt is
that many, and what was added since at the bytes per token that additions have had lately.
Where nothing is known of a trajectory, all of its prompt counts at the bytes per token of
prompts that were seen for the first time. Both begin as in English text and code, and are
kept apart, as first prompts are instructions and schemas while additions are dialogue.

Placement needs tokens as well, to know beginnings that prompts share: it gets four bytes
of text for each token, one stride after the other. A stride that followed what is learned
would make other tokens of the same text, and nothing cached would be known again. So a
trajectory keeps the stride that it began with, and new ones get another only where it is
off by so much that caches would seem far fuller or emptier than they are. What a stride
makes too many is cut: there are never more such tokens than the prompt is estimated to have.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_war.routing.http.prompt import Prompt

_BYTES_PER_TOKEN = 4.0
"""Of English text and code, in the usual tokenizers."""
_TRUST = 256.0
"""Tokens of experience that this is worth: the first answer counts for more."""
_MEMORY = 0.99
"""Per answer: a mean over the last hundred."""
_MOST = 16.0
"""Bytes per token beyond which a replica has not counted what it was sent, or not all of it."""
_LEAST = 1.0
"""Below it there are tokens of images, say, and not only of text: others' text is not measured by that."""
_DRIFT = 1.1
"""By how much a stride may be off. Tokens of text differ by as much from one task to the next."""


class _Ratio:
    """Bytes per token, of late."""

    def __init__(self) -> None:
        self._bytes, self._tokens = _TRUST * _BYTES_PER_TOKEN, _TRUST

    @property
    def value(self) -> float:
        return self._bytes / self._tokens

    def add(self, size: int, tokens: int) -> None:
        if _LEAST * tokens <= size <= _MOST * tokens:
            self._bytes = _MEMORY * self._bytes + size
            self._tokens = _MEMORY * self._tokens + tokens


@dataclass(slots=True)
class Course:
    """What is known of the length of a trajectory.

    Attributes:
        stride: bytes that each token stands for where placement is concerned; 1 or more.
        size: bytes of the last prompt that was counted.
        tokens: what it counted; 0 while none was.
    """

    stride: float
    size: int = 0
    tokens: int = 0


class Lengths:
    """What was learned of all prompts."""

    def __init__(self) -> None:
        """Know nothing but what is usual."""
        self._first, self._added = _Ratio(), _Ratio()
        self._stride = _BYTES_PER_TOKEN

    def course(self) -> Course:
        """Of a new trajectory."""
        return Course(self._stride)

    def tokens(self, prompt: Prompt, course: Course) -> int:
        """Estimated length of a trajectory's prompt; that of its token ids where all are given."""
        known, rest = _parts(prompt, course)
        return known + round(rest / (self._added if known else self._first).value)

    def learn(self, prompt: Prompt, course: Course, counted: int) -> None:
        """A replica has counted the prompt's tokens; 0 where it does not say."""
        if counted * _MOST < prompt.size:
            return
        known, rest = _parts(prompt, course)
        (self._added if known else self._first).add(rest, counted - known)
        if prompt.tokens is None:
            course.size, course.tokens = prompt.size, counted
        usual = self._first.value
        if not 1 / _DRIFT < usual / self._stride < _DRIFT:
            self._stride = usual


def _parts(prompt: Prompt, course: Course) -> tuple[int, int]:
    """Tokens of a prompt that are known, and bytes of the rest."""
    if prompt.tokens is not None:
        return len(prompt.tokens.ids), prompt.rest
    if course.tokens and prompt.size >= course.size:
        return course.tokens, prompt.size - course.size
    return 0, prompt.size  # its history was cut, or nothing is known
