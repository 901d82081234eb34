"""Actors without Ray: their methods run in other threads, and what goes in or out is a copy."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

from ray.exceptions import RayActorError, RayTaskError


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Of asynchronous actors; in another thread, so that no context of the caller's gets there by itself."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="actors", daemon=True).start()
    return loop


def _copy(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


class Ref:
    """What a call will give. It can be awaited, and got."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def get(self) -> Any:
        try:
            return _copy(self._future.result(timeout=10))
        except Exception as error:
            raise _as_ray_raises(error) from None

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        try:
            return _copy(await asyncio.wrap_future(self._future))
        except Exception as error:
            raise _as_ray_raises(error) from None


def _as_ray_raises(error: Exception) -> Exception:
    if isinstance(error, RayActorError):
        return error
    return RayTaskError("method", f"{type(error).__name__}: {error}", error).as_instanceof_cause()


class Stream:
    """What a call of an asynchronous generator gives: a `Ref` for each item."""

    def __init__(self, items: Any) -> None:
        self._items: asyncio.Queue[Ref | None] = asyncio.Queue()
        self._pumping = asyncio.run_coroutine_threadsafe(self._pump(items), _loop())

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Ref:
        taken = asyncio.run_coroutine_threadsafe(self._items.get(), _loop())
        item = await asyncio.wrap_future(taken)
        if item is None:
            raise StopAsyncIteration
        return item

    def cancel(self) -> None:
        self._pumping.cancel()

    async def _pump(self, items: Any) -> None:
        try:
            async for item in items:
                self._put(lambda done, item=item: done.set_result(item))
            self._items.put_nowait(None)
        except Exception as error:
            self._put(lambda done, error=error: done.set_exception(error))

    def _put(self, finish: Callable[[Future[Any]], None]) -> None:
        done: Future[Any] = Future()
        finish(done)
        self._items.put_nowait(Ref(done))


class _Method:
    def __init__(self, handle: Handle, method: Callable[..., Any]) -> None:
        self._handle, self._method = handle, method

    def remote(self, *arguments: Any, **options: Any) -> Any:
        arguments, options = _copy((arguments, options))
        if self._handle.dead:
            died: Future[Any] = Future()
            died.set_exception(RayActorError())
            return Ref(died)
        if inspect.isasyncgenfunction(self._method):
            return Stream(self._method(*arguments, **options))
        if self._handle.thread is not None:
            return Ref(self._handle.thread.submit(self._method, *arguments, **options))
        return Ref(asyncio.run_coroutine_threadsafe(self._call(arguments, options), _loop()))

    async def _call(self, arguments: Any, options: Any) -> Any:
        answer = self._method(*arguments, **options)
        return await answer if inspect.isawaitable(answer) else answer


class Handle:
    """The handle of an actor.

    Attributes:
        actor: the object itself, for tests to look at.
        dead: whether its process ended; calls fail from then on.
        thread: where its methods run one after the other; None where any of them is asynchronous, as then
            all of them run in the loop.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.dead = False
        methods = [getattr(type(actor), name) for name in dir(type(actor))]
        asynchronous = any(map(inspect.iscoroutinefunction, methods))
        self.thread = None if asynchronous else ThreadPoolExecutor(1)

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, getattr(self.actor, name))


def get(refs: Any) -> Any:
    """In the place of `ray.get`."""
    return [ref.get() for ref in refs] if isinstance(refs, list) else refs.get()


def cancel(stream: Stream) -> None:
    """In the place of `ray.cancel`."""
    stream.cancel()


class Group:
    """In the place of `RayWorkerGroup`: so many workers for each shard, the first of which is its leader."""

    def __init__(self, actors: Sequence[Any], tied: int = 1) -> None:
        self._workers = [Handle(actor) for actor in actors]
        self._tied = tied

    @property
    def workers(self) -> list[Handle]:
        return self._workers

    @property
    def dp_size(self) -> int:
        return len(self._workers) // self._tied

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        return range(0, len(self._workers), self._tied)[dp_shard_idx]

    def run_single_worker_single_data(self, method_name: str, worker_idx: int, **options: Any) -> Any:
        return getattr(self._workers[worker_idx], method_name).remote(**options)

    def run_all_workers_single_data(
        self, method_name: str, run_rank_0_only_axes: list[str] | None = None, **options: Any
    ) -> list[Any]:
        step = self._tied if run_rank_0_only_axes else 1
        return [getattr(each, method_name).remote(**options) for each in self._workers[::step]]

    def run_all_workers_sharded_data(
        self, method_name: str, data: Sequence[Any], common_kwargs: dict[str, Any], **_: Any
    ) -> list[Any]:
        leaders = self._workers[:: self._tied]
        return [
            getattr(leader, method_name).remote(data=shard, **common_kwargs)
            for leader, shard in zip(leaders, data, strict=True)
        ]

    def get_all_worker_results(self, future_bundle: list[Any]) -> list[Any]:
        return get(future_bundle)

    def shutdown(self, cleanup_method: str | None = None) -> bool:
        for each in self._workers:
            each.dead = True
            if each.thread is not None:
                each.thread.shutdown(wait=False)
        return True
