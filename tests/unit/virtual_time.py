"""An event loop whose time passes only when nobody has anything to do: minutes of waiting take none."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class VirtualTime(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds


class VirtualTimePolicy(asyncio.DefaultEventLoopPolicy):
    """For the fixture `event_loop_policy` of pytest-asyncio."""

    def new_event_loop(self) -> VirtualTime:
        return VirtualTime()


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTime) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "all wait, and nothing will ever wake them"
        if timeout > 0:
            self._loop.jump(timeout)
        return super().select(0)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run it for an hour at most; end whatever it leaves behind, and what that leaves when it is ended."""

    async def whole() -> None:
        try:
            async with asyncio.timeout(3600):
                await work
        finally:
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(whole())


def now() -> float:
    return asyncio.get_running_loop().time()
