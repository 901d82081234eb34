"""Replicas that are as the real ones but for one thing."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import numpy as np

from nemo_war.generation.embedded.replica import Replica
from nemo_war.generation.embedded.turn import Answer, Turn
from tools.chaos_bench.faults import Faults


class PreparedReplica(Replica):
    """Has, as a replica with a real engine, imported torch when it has started, and a process of its own."""

    _core: subprocess.Popen | None = None

    async def start(self) -> dict[str, Any]:
        self._core = subprocess.Popen(["sleep", "infinity"])
        import torch  # noqa: F401

        return await super().start()

    def stop(self) -> None:
        if self._core is not None:
            self._core.kill()
        super().stop()


class UnsaltedReplica(PreparedReplica):
    """Does not salt: with caches that were not reset it serves stale KV."""

    async def generate(self, turn: Turn) -> Answer:
        return await super().generate(replace(turn, metadata=replace(turn.metadata, epoch=0)))


class ObedientReplica(Replica):
    """Takes orders that a real engine cannot be given."""

    async def load_weights(self, blob: Any) -> dict[str, Any]:
        orders = Faults(self._number)
        if orders.takes("fail_load"):
            raise RuntimeError("this fails at load, as ordered")
        if orders.takes("wrong_digest"):
            blob = np.array(blob)
            blob[-1] ^= 1
        return await super().load_weights(blob)

    async def reset_caches(self) -> bool:
        return not Faults(self._number).takes("refuse_reset") and await super().reset_caches()

    async def import_history(self, blob: Any) -> int:
        if Faults(self._number).takes("damage_import"):
            blob = np.array(blob)
            blob[-1] ^= 1
        return await super().import_history(blob)
