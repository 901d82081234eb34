"""A shared scheduler with what Ray hands over."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from nemo_war.generation.scheduling.scheduler import SharedScheduler
from nemo_war.metadata import TurnMetadata
from nemo_war.routing.facts import Outcome, ReplicaFacts, TurnFacts
from nemo_war.routing.workload_aware import WorkloadAware


def handed_over(thing: Any) -> Any:
    """As Ray gives it to an actor: its arrays are views into shared memory, which is read-only."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(thing, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(pickled, buffers=[bytes(buffer.raw()) for buffer in buffers])


def test_what_ray_hands_over_may_be_read_only() -> None:
    scheduler = SharedScheduler(handed_over(WorkloadAware())).scheduler
    replicas = [ReplicaFacts(number, kv_tokens=10_000) for number in range(2)]
    scheduler.begin_step(4)
    context = np.arange(300, dtype=np.int32)
    for turn in range(3):
        for number in range(4):
            metadata = TurnMetadata(f"t{number}", "g", turn=turn)
            scheduler.submit(handed_over(TurnFacts(metadata, len(context), 64, context)), float(turn))
        placed = scheduler.decide(replicas, float(turn))
        assert len(placed) == 4
        for placement in placed:
            scheduler.finish(placement.ticket, Outcome(50, 0), turn + 0.5)
        context = np.concatenate([context, np.arange(100, dtype=np.int32)])
    for number in range(4):
        scheduler.end(f"t{number}")
    assert scheduler.check_integrity()
