"""A pytest plugin for NeMo-RL's own tests: a Ray of their own, and without a dashboard's packages."""

from __future__ import annotations

from typing import Any

import ray

_init = ray.init


def init(*arguments: Any, **options: Any) -> Any:
    """Ray's, but there is no cluster to join: one that is there is another test's.

    Raises:
        ConnectionError: one was to be joined.
    """
    if options.pop("address", None) == "auto":
        raise ConnectionError("there is no cluster to join")
    return _init(*arguments, **(options | {"address": "local", "include_dashboard": False}))


ray.init = init
