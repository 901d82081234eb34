"""What a refit costs on top of the transfer of the weights.

Two real replicas, idle and with turns that run, in each of `in_flight`'s modes. Beside them a baseline
loads the same weights on all replicas at once and does nothing else: no pause, no reset, no epoch. What
frozen turns compute again afterwards is not in it, as that is no part of `Fleet.refit`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from nemo_war.config import SpeculativeConfig, WarConfig
from nemo_war.generation.embedded.fleet import Fleet
from nemo_war.generation.embedded.replica import Replica
from nemo_war.generation.embedded.weights import Weights, share_weights
from nemo_war.generation.refit import Phase
from nemo_war.routing.round_robin import RoundRobin
from tests.engine.fleets import copy_prompt, fleet, turn
from tests.engine.policies import as_bytes, perturbed
from tools.refit_bench.timing import RefitTiming, Stopwatch, summary

_MODES: tuple[Literal["drain", "pause", "abort"], ...] = ("drain", "pause", "abort")
_REPLICAS = 2
_WARM_UPS = 2
_LOADS = {"idle": 0, "running": 4}
"""Turns in flight, by what that is called; they are spread evenly."""
_TOKENS = 32
_BEGUN_S = 0.4
_PERTURBATION = 0.002
_WAR = WarConfig(speculative=SpeculativeConfig(max_draft_tokens=4))


class TimedReplica(Replica):
    """Remembers how long its last load took."""

    load_s = 0.0

    async def load_weights(self, blob: Any) -> dict[str, Any]:
        started = time.perf_counter()
        report = await super().load_weights(blob)
        self.load_s = time.perf_counter() - started
        return report

    async def last_load_s(self) -> float:
        return self.load_s


async def overhead(model: Path, refits: int) -> dict[str, Any]:
    """By mode, idle and with turns in flight."""
    policies = [share_weights(as_bytes(perturbed(model, _PERTURBATION, seed))) for seed in range(2)]
    stopwatch = Stopwatch()
    async with fleet(
        model, war=_WAR, replicas=_REPLICAS, replica_class=TimedReplica, record=stopwatch.record
    ) as on:
        measurement = _Measurement(on, stopwatch, copy_prompt(model))
        for number in range(_WARM_UPS + refits):
            await measurement.round(policies[number % len(policies)], counts=number >= _WARM_UPS)
            print(f"round {number + 1} of {_WARM_UPS + refits} is done", flush=True)
    return measurement.result()


class _Measurement:
    """Refits of one fleet; modes and baselines take turns, so that drift of the machine hits all alike."""

    def __init__(self, on: Fleet, stopwatch: Stopwatch, prompt: list[int]) -> None:
        self._on, self._stopwatch, self._prompt = on, stopwatch, prompt
        self._dispatcher = on.dispatcher(RoundRobin())
        self._timings: dict[tuple[str, str], list[RefitTiming]] = {}
        self._baselines: dict[str, list[float]] = {}

    async def round(self, weights: Weights, counts: bool) -> None:
        """One load and one refit of each kind; those that warm up do not count."""
        for load, turns in _LOADS.items():
            async with self._running(turns):
                baseline = await self._load_only(weights)
            if counts:
                self._baselines.setdefault(load, []).append(baseline)
            for mode in _MODES:
                async with self._running(turns):
                    timing = await self._refit(weights, mode)
                if counts:
                    self._timings.setdefault((mode, load), []).append(timing)

    def result(self) -> dict[str, Any]:
        return {
            mode: {load: summary(self._timings[mode, load], self._baselines[load]) for load in _LOADS}
            for mode in _MODES
        }

    @asynccontextmanager
    async def _running(self, count: int) -> AsyncIterator[None]:
        """So many turns in flight while the block runs; they are over behind it."""
        turns = [
            asyncio.create_task(self._on.generate(turn(self._prompt, _TOKENS), self._dispatcher))
            for _ in range(count)
        ]
        if turns:
            await asyncio.sleep(_BEGUN_S)
        yield
        await asyncio.gather(*turns)

    async def _load_only(self, weights: Weights) -> float:
        started = time.perf_counter()
        await self._on.ask("load_weights", weights.reference)
        return time.perf_counter() - started

    async def _refit(self, weights: Weights, mode: Literal["drain", "pause", "abort"]) -> RefitTiming:
        self._on._cycle.in_flight = mode  # a fleet has one for life, but three fleets would be three machines
        started = time.perf_counter()
        outcome = await self._on.refit(weights)
        total = time.perf_counter() - started
        loads = await self._on.ask("last_load_s")
        return RefitTiming(
            total,
            self._stopwatch.seconds(Phase.QUIETING),
            max(loads.values()),
            self._stopwatch.seconds(Phase.RESETTING),
            outcome.in_flight,
        )
