"""Faults that are ordered from outside and happen inside a fake engine.

Each replica has a file of orders in a control folder, `replica-N.json`, where N is the seed of its
engine: with `EngineSpec(seed=0)` the replica's number. `order` writes it, `orders` reads it, and
the engine looks into it wherever something may go wrong. What happened once is struck out,
so that a replica that is started again does not die of the same order, and is noted under `fired`.

Places that faults can be put at:

    start   the engine is being made
    step    a step is about to compute something
    load    amid a transfer of weights: one tensor is new, the others are not
    reset   the prefix cache is about to be reset
    pause, resume
    any word in the name of a method that `collective_rpc` calls, or its whole name: `commit`, `export`

Orders, all of which may be given together:

    step_ms           least time of a step, 1 until told otherwise; stays
    slow              {place: seconds} to wait there; stays
    die_at            SIGKILL to the own process
    freeze_at         SIGSTOP to the own process
    hang_at           the engine never comes back, while its process's event loop runs on
    break_at          the engine fails for good: `EngineDeadError` for everything from then on
    after             how often the place of these four is passed before it happens
    fail_<place>      so many times an exception there; the engine lives on. Not at `step`.
    refuse_reset      so many times the prefix cache is not reset, and the answer says so
    pretend_reset     so many times it is not reset, and the answer says that it was
    wrong_digest      so many transfers of weights arrive damaged: a bit of the memory file has changed
    damage_import     the same of histories
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "NEMO_WAR_CHAOS"
"""Environment variable that names the control folder; without it nothing goes wrong."""
FAKE = Path(__file__).parent / "fake"
"""The folder to put in front of `sys.path`, so that `vllm` is the fake engine."""

_ENDS = ("die_at", "freeze_at", "hang_at", "break_at")
_COUNTED = ("refuse_reset", "pretend_reset", "wrong_digest", "damage_import")
_STEP_MS = 1.0

_log = logging.getLogger(__name__)


class EngineBreaksError(BaseException):
    """Ends the engine; not an `Exception`, as no handler on the way may stop it."""


def environment(folder: Path | str | None = None) -> dict[str, str]:
    """Variables for the processes that are to run the fake engine under orders from a folder."""
    paths = [str(FAKE), str(Path(__file__).parents[2])]
    return {"PYTHONPATH": os.pathsep.join(paths)} | ({VARIABLE: str(folder)} if folder else {})


def order(folder: Path | str, replica: int, **given: Any) -> None:
    """Add to a replica's orders; None takes one back.

    Raises:
        ValueError: there is no such order.
    """
    _check(given)

    def add(orders: dict[str, Any]) -> None:
        orders |= given
        for key in [key for key, value in orders.items() if value is None]:
            del orders[key]

    _change(_file(folder, replica), add)


def renew(folder: Path | str, replica: int, **given: Any) -> None:
    """Give a replica these orders and no others, and forget what has happened to it.

    Raises:
        ValueError: there is no such order.
    """
    _check(given)

    def replace(orders: dict[str, Any]) -> None:
        orders.clear()
        orders |= given

    _change(_file(folder, replica), replace)


def orders(folder: Path | str, replica: int) -> dict[str, Any]:
    """What a replica's orders are now; `fired` lists what has happened."""
    try:
        return json.loads(_file(folder, replica).read_text())
    except FileNotFoundError:
        return {}


class Faults:
    """An engine's view of its orders."""

    def __init__(self, replica: int, folder: str | None = None) -> None:
        folder = os.environ.get(VARIABLE) if folder is None else folder
        self._path = _file(folder, replica) if folder else None
        self._seen: tuple[int, ...] | None = None
        self._orders: dict[str, Any] = {}

    @property
    def step_s(self) -> float:
        """Least time of a step."""
        return self._read().get("step_ms", _STEP_MS) / 1000

    def at(self, *places: str) -> None:
        """The engine is at a place, by all the names it has: let happen what was ordered.

        Raises:
            RuntimeError: it is to fail here.
            EngineBreaksError: it is to fail for good.
        """
        present = self._read()
        if not present:
            return
        for place in places:
            if place in present.get("slow", {}):
                time.sleep(present["slow"][place])
        for end in _ENDS:
            if present.get(end) in places and self._fires(end):
                self._end(end)
        for place in places:
            if self.takes(f"fail_{place}"):
                raise RuntimeError(f"this fails at {place}, as ordered")

    def takes(self, count: str) -> bool:
        """Use up one of an order that is counted; False where none is left."""
        if not self._read().get(count):
            return False

        def use(present: dict[str, Any]) -> bool:
            left = present.get(count, 0)
            if left < 1:
                return False
            present[count] = left - 1
            _note(present, count)
            return True

        return self._change(use)

    def _fires(self, end: str) -> bool:
        """Strike an order out, unless its place is to be passed more often."""

        def pass_or_strike(present: dict[str, Any]) -> bool:
            if end not in present:
                return False
            if present.get("after", 0) > 0:
                present["after"] -= 1
                return False
            _note(present, f"{end} {present.pop(end)}")
            return True

        return self._change(pass_or_strike)

    def _end(self, end: str) -> None:
        _log.warning("%s, as ordered", end)
        if end == "die_at":
            os.kill(os.getpid(), signal.SIGKILL)
        elif end == "freeze_at":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif end == "hang_at":
            threading.Event().wait()
        else:
            raise EngineBreaksError("as ordered")

    def _read(self) -> dict[str, Any]:
        """The orders; the file is read again when it is another one, as each change makes a new one."""
        if self._path is None:
            return {}
        try:
            stat = self._path.stat()
            seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if seen != self._seen:
                self._orders, self._seen = json.loads(self._path.read_text()), seen
        except FileNotFoundError:
            self._orders, self._seen = {}, None
        return self._orders

    def _change(self, change: Callable[[dict[str, Any]], bool]) -> bool:
        assert self._path is not None
        return _change(self._path, change)


def _check(given: dict[str, Any]) -> None:
    known = {"step_ms", "slow", "after", *_ENDS, *_COUNTED}
    unknown = [key for key in given if key not in known and not key.startswith("fail_")]
    if unknown:
        raise ValueError(f"no such order: {', '.join(unknown)}; there are {', '.join(sorted(known))}")


def _file(folder: Path | str, replica: int) -> Path:
    return Path(folder) / f"replica-{replica}.json"


def _note(present: dict[str, Any], what: str) -> None:
    present.setdefault("fired", []).append(what)


def _change(path: Path, change: Callable[[dict[str, Any]], Any]) -> Any:
    """Change a file of orders, which both the driver and the engine do; readers see all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        present = json.loads(path.read_text()) if path.exists() else {}
        result = change(present)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as new:
            json.dump(present, new)
        os.replace(new.name, path)
        return result
