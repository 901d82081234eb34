"""Ray listens on all interfaces of a machine and runs what it is sent: here, only from who knows a token."""

from __future__ import annotations

import os
import secrets


def protect_ray() -> None:
    """Have the Ray instances of this process and its children ask for a token that nobody else knows.

    To be called before `ray` is imported, as it reads this once. What the user has set stands.
    """
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
