"""Replica actors without Ray and without engines: what a fleet sees of them, and what may befall them."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import Any

from nemo_war.generation.embedded.actors import ReplicaLostError
from nemo_war.generation.embedded.replica import ABORTED
from nemo_war.generation.embedded.turn import Answer, Turn
from nemo_war.generation.self_check import Probe

TOKEN_S = 0.002


class FakeEngine:
    """One replica's engine, of one life: it generates a token every so often, of its weights.

    Attributes:
        weights: what it has loaded; "start" at first.
        kv: of which weights its caches are; None where they are empty.
        stale: answers that were computed on KV of other weights than its own.
    """

    def __init__(self) -> None:
        self.weights, self.epoch = "start", 0
        self.kv: str | None = None
        self.going = True
        self.dead = asyncio.Event()
        self.running: set[str] = set()
        self.stale = 0

    async def generate(self, turn: Turn) -> Answer:
        began, name, tokens = self.epoch, turn.metadata.trajectory, []
        self.running.add(name)
        while len(tokens) < turn.max_new_tokens:
            while not self.going and name in self.running:
                await asyncio.sleep(TOKEN_S)
            if name not in self.running:
                return Answer(tuple(tokens), (), ABORTED, 0, 0.0, (began, self.epoch))
            self.stale += self.kv not in (None, self.weights)
            self.kv = self.weights
            tokens.append(self.epoch)
            await asyncio.sleep(TOKEN_S)
        self.running.discard(name)
        return Answer(tuple(tokens), (0.0,) * len(tokens), "length", 0, 0.0, (began, self.epoch))


def _says(weights: str) -> dict[int, float]:
    return {token: -float(sum(weights.encode()) + token) for token in range(5)}


class FakeActors:
    """In the place of `Actors`.

    Attributes:
        engines: of the present life of each replica.
        asked: (replica, method), how often.
        refuse: (replica, method): so many calls that fail.
        hang: (replica, method): so many calls that are never answered.
        slow: method: how long a call is on its way.
        broken: replicas that do not start again.
        pretend: replicas that say once that they reset their caches, and did not.
    """

    def __init__(self, *_: Any) -> None:
        self.engines: dict[int, FakeEngine] = {}
        self.asked: Counter[tuple[int, str]] = Counter()
        self.refuse: defaultdict[tuple[int, str], int] = defaultdict(int)
        self.hang: defaultdict[tuple[int, str], int] = defaultdict(int)
        self.slow: defaultdict[str, float] = defaultdict(lambda: TOKEN_S)
        self.broken: set[int] = set()
        self.pretend: set[int] = set()
        self.start_s = 0.01

    async def start(self, number: int) -> dict[str, Any]:
        self.asked[number, "start"] += 1
        await asyncio.sleep(self.start_s)
        if number in self.broken:
            raise RuntimeError("no memory")
        self.engines[number] = FakeEngine()
        return {"kv_tokens": 0}

    async def kill(self, number: int, patience_s: float = 0.0) -> None:
        engine = self.engines.pop(number, None)
        if engine is not None:
            engine.dead.set()

    async def stop(self) -> None:
        for number in list(self.engines):
            await self.kill(number)

    def crash(self, number: int) -> None:
        """The replica dies by itself."""
        self.engines[number].dead.set()

    async def ask(self, number: int, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        engine = self.engines.get(number)
        self.asked[number, method] += 1
        if engine is None or engine.dead.is_set():
            raise ReplicaLostError(number, "died")
        call = asyncio.ensure_future(self._call(number, engine, method, *arguments))
        dead = asyncio.ensure_future(engine.dead.wait())
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait({call, dead}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise ReplicaLostError(number, f"did not {method} within {timeout_s} s") from None
        finally:
            dead.cancel()
            if not call.done():
                call.cancel()
        if engine.dead.is_set():
            raise ReplicaLostError(number, "died")
        return call.result()

    async def _call(self, number: int, engine: FakeEngine, method: str, *arguments: Any) -> Any:
        if self.hang[number, method]:
            self.hang[number, method] -= 1
            await asyncio.Event().wait()
        refused = self.refuse[number, method] > 0
        self.refuse[number, method] -= refused
        await asyncio.sleep(self.slow[method])
        match method:
            case "generate":
                return await engine.generate(*arguments)
            case "load_weights":
                if refused:
                    raise RuntimeError("transfer broke off")
                (engine.weights,) = arguments
                return {"digest": engine.weights}
            case "reset_caches":
                if not refused and number not in self.pretend:
                    engine.kv = None
                self.pretend.discard(number)
                return not refused
            case "set_epoch":
                (engine.epoch,) = arguments
            case "pause":
                engine.going = False
                if arguments == ("abort",):
                    engine.running.clear()  # what comes later waits, as in vLLM
            case "resume":
                engine.going = True
            case "probe":
                kv, engine.kv = engine.kv or engine.weights, engine.weights
                return Probe(*(_says(weights) for weights in (kv, engine.weights)))
            case "ping" | "commit":
                pass
            case _:
                raise AssertionError(method)
        return None
