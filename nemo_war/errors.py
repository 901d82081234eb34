"""The errors a user can cause and mend."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(Exception):
    """Something the user asked for cannot be done; the message says what to change.

    The command line prints the message as one line and exits with status 2.
    """


class ConfigError(UserError):
    """One value of the configuration is wrong.

    Attributes:
        key: dotted path of the value, as it would be written in an override.
        value: what was found there.
        allowed: what may stand there.
        fix: the change that would make it right.
    """

    def __init__(self, key: str, value: object, allowed: str, fix: str) -> None:
        self.key, self.value, self.allowed, self.fix = key, value, allowed, fix
        super().__init__(f"{key}={_shown(value)}: {allowed}; {fix}")


def choices(values: Iterable[object]) -> str:
    """The sentence part that lists what is allowed."""
    return "allowed: " + ", ".join(str(value) for value in values)


def _shown(value: object, limit: int = 80) -> str:
    """A value as one short line, since a user may have put a whole block there."""
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
