"""A layer that is looked for after weights were loaded; the fake model has none."""

from __future__ import annotations


class ParallelLMHead:
    """The output head."""
