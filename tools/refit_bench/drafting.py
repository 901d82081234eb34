"""How well drafts did over some turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Drafting:
    """What turns generated, and what became of the drafts in them.

    Attributes:
        output_tokens: of the turns.
        drafts: engine steps of single requests that verified a draft.
        draft_tokens, accepted_tokens: of those.
    """

    turns: int = 0
    output_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @classmethod
    def between(
        cls, turns: int, output_tokens: int, before: Mapping[str, int], after: Mapping[str, int]
    ) -> Self:
        """From a replica's counters; they begin anew where it was started again, and `before` is empty."""
        names = ("drafts", "draft_tokens", "accepted_tokens")
        return cls(turns, output_tokens, *(after[name] - before.get(name, 0) for name in names))

    def __add__(self, other: Drafting) -> Drafting:
        names = [each.name for each in fields(self)]
        return Drafting(*(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens of a step that verified a draft; None where none did."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None

    @property
    def draft_share(self) -> float:
        """Share of steps that verified a draft; each step gives one token and what was accepted."""
        return self.drafts / max(1, self.output_tokens - self.accepted_tokens)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a request's step, whether it verified a draft or not."""
        return self.output_tokens / max(1, self.output_tokens - self.accepted_tokens)

    def facts(self) -> dict[str, Any]:
        """All of it, for people and for JSON."""
        length = self.acceptance_length
        return {each.name: getattr(self, each.name) for each in fields(self)} | {
            "acceptance_length": None if length is None else round(length, 3),
            "draft_share": round(self.draft_share, 3),
            "tokens_per_step": round(self.tokens_per_step, 3),
        }


def total(parts: Iterable[Drafting]) -> Drafting:
    """Their sum."""
    return sum(parts, Drafting())


def shares(of: Drafting, steady: Drafting) -> dict[str, float | None]:
    """How both means compare with steady state's; no acceptance length where either drafted nothing."""
    lengths = of.acceptance_length, steady.acceptance_length
    return {
        "acceptance_length": None if None in lengths else round(lengths[0] / lengths[1], 3),
        "tokens_per_step": round(of.tokens_per_step / steady.tokens_per_step, 3),
    }
