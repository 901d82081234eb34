"""The watch over the router's replicas."""

from __future__ import annotations

import asyncio
from typing import Any

from nemo_war.routing.http.replicas import Replicas
from nemo_war.routing.http.settings import RouterSettings


class Unwatched(Replicas):
    """Looks at nobody."""

    async def look(self, session: Any, replica: Any) -> None:
        pass


async def test_a_watch_that_is_ended_when_a_request_has_just_failed_ends() -> None:
    settings = RouterSettings(("http://127.0.0.1:1",), health_interval_s=60.0)
    replicas = Unwatched(settings, lambda number: None, lambda number: None, lambda line: None)
    watch = asyncio.ensure_future(replicas.watch(None, replicas.all[0]))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    replicas.all[0].suspected.set()
    await asyncio.sleep(0)
    watch.cancel()
    await asyncio.wait({watch}, timeout=0.5)
    assert watch.cancelled()
