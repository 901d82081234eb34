"""What a scheduler in another process has to hear: in order, and until it has.

Each word has a number, by which the scheduler acts on it once. It is sent at once; what was
not acknowledged is sent again when the scheduler says how far it got. The numbers begin anew
with each life, which hears nothing of what concerns an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_war.generation.scheduling.scheduler import Pulse


@dataclass(slots=True)
class _Word:
    """One thing to hear.

    Attributes:
        lasts: the next life has to hear it, if this one does not.
        told: the beat before which it was last sent; -1: it never was.
    """

    method: str
    arguments: tuple[Any, ...]
    lasts: bool
    told: int = -1


class Outbox:
    """Words that were not acknowledged yet."""

    def __init__(self, send: Callable[[int, str, tuple[Any, ...]], None]) -> None:
        """Hold none.

        Args:
            send: sends a word, given its number, method and arguments.
        """
        self._send = send
        self._words: dict[int, _Word] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._words)

    def tell(self, method: str, *arguments: Any, beat: int | None, lasts: bool = False) -> None:
        """Have the scheduler hear this.

        Args:
            method: its name there.
            arguments: of it.
            beat: the next one; None where the scheduler does not answer, and would not hear it now.
            lasts: if this life does not hear it, the next one has to.
        """
        number, self._next = self._next, self._next + 1
        self._words[number] = _Word(method, arguments, lasts)
        if beat is not None:
            self._send_word(number, beat)

    def acknowledge(self, number: int) -> None:
        """The present life has it."""
        self._words.pop(number, None)

    def begin_life(self) -> None:
        """Leave what the life that begins has to hear."""
        lasting = [word for word in self._words.values() if word.lasts]
        self._words, self._next = dict(enumerate(lasting)), len(lasting)

    def send_again(self, pulse: Pulse, beat: int, now: int) -> None:
        """Send what the scheduler should have heard before a beat and has not."""
        for number, word in list(self._words.items()):
            if number < pulse.next:
                del self._words[number]
            elif word.told <= beat:
                self._send_word(number, now)

    def _send_word(self, number: int, beat: int) -> None:
        word = self._words[number]
        word.told = beat
        self._send(number, word.method, word.arguments)
