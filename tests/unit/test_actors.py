"""Replica actors on a Ray of a few lines: who may be asked when, and what comes back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_war.generation.embedded import actors as module
from nemo_war.generation.embedded.actors import Actors, ReplicaLostError
from nemo_war.generation.embedded.engine import EngineSpec
from nemo_war.generation.embedded.replica import EngineLostError


class Body:
    """A replica that starts when it may.

    Attributes:
        may_start: set by tests.
    """

    may_start: asyncio.Event

    def __init__(self, number: int, spec: EngineSpec) -> None:
        self.engine: str | None = None

    async def process(self) -> int:
        return os.getpid()

    async def start(self) -> dict[str, Any]:
        await self.may_start.wait()
        self.engine = "engine"
        return {"kv_tokens": 0}

    async def commit(self) -> int:
        assert self.engine is not None
        return len(self.engine)

    async def lose(self) -> None:
        raise EngineLostError("no more")

    async def stop(self) -> None:
        self.engine = None


class Handle:
    """Calls methods in tasks of this process."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def __getattr__(self, name: str) -> SimpleNamespace:
        def remote(*arguments: Any) -> asyncio.Task:
            return asyncio.ensure_future(wrapped(getattr(self._body, name)(*arguments)))

        return SimpleNamespace(remote=remote)


class TaskError(Exception):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


async def wrapped(call: Any) -> Any:
    """As with Ray, whatever is raised comes back as the cause of its own error."""
    try:
        return await call
    except Exception as error:
        raise TaskError(error) from None


class FakeRay:
    """What `actors` uses of Ray.

    Attributes:
        exported: classes that were made remote.
    """

    def __init__(self) -> None:
        self.exported: list[type] = []
        self.exceptions = SimpleNamespace(RayTaskError=TaskError, RayActorError=ConnectionError)

    def remote(self, body: Callable) -> SimpleNamespace:
        self.exported.append(body)
        made = SimpleNamespace(remote=lambda *arguments: Handle(body(*arguments)))
        return SimpleNamespace(options=lambda **_: made)

    def kill(self, handle: Handle) -> None:
        pass

    def cancel(self, reference: asyncio.Task) -> None:
        reference.cancel()


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr(module, "process_environment", lambda *_: {})
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "_end", no_process_ends)
    return fake


async def no_process_ends(*_: Any) -> None:
    """The processes are this one."""


def actors() -> Actors:
    Body.may_start = asyncio.Event()
    return Actors(EngineSpec("m", {}, None), 1, Body)


async def test_nobody_is_asked_before_it_has_started_or_after_its_end(ray: FakeRay) -> None:
    made = actors()
    starting = asyncio.ensure_future(made.start(0))
    await asyncio.sleep(0.01)
    with pytest.raises(ReplicaLostError, match="replica 0 is not running"):
        await made.ask(0, "commit")
    Body.may_start.set()
    assert await starting == {"kv_tokens": 0}
    assert await made.ask(0, "commit") == 6
    await made.kill(0)
    with pytest.raises(ReplicaLostError, match="replica 0 is not running"):
        await made.ask(0, "commit")


async def test_starting_again_exports_nothing_again(ray: FakeRay) -> None:
    made = actors()
    Body.may_start.set()
    for _ in range(3):
        await made.start(0)
        await made.kill(0)
    assert ray.exported == [Body]


async def test_a_replica_has_a_folder_for_temporary_files_as_long_as_it_is_there(
    ray: FakeRay, tmp_path: Path
) -> None:
    made = actors()
    Body.may_start.set()
    for _ in range(2):
        await made.start(0)
        await made.start(1)
        await made.kill(0)
        (left,) = tmp_path.glob("nemo-war-replica-*")
        (left / "a socket").touch()
        assert left.name.startswith("nemo-war-replica-1-")
        assert left.stat().st_mode & 0o777 == 0o700
        await made.stop()
        assert not list(tmp_path.iterdir())


async def test_an_engine_that_is_lost_is_a_replica_that_is_lost(ray: FakeRay) -> None:
    made = actors()
    Body.may_start.set()
    await made.start(0)
    with pytest.raises(ReplicaLostError, match="replica 0 lost its engine: no more"):
        await made.ask(0, "lose")
    await made.stop()


async def test_one_that_does_not_answer_in_time_is_lost(ray: FakeRay) -> None:
    made = actors()
    Body.may_start.set()
    await made.start(0)
    Body.may_start.clear()
    with pytest.raises(ReplicaLostError, match=r"replica 0 did not start within 0\.01 s"):
        await made.ask(0, "start", timeout_s=0.01)
