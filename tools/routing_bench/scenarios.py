"""What is rolled out, on what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_war.config import StepTimePrior
from nemo_war.generation.embedded.encoder import encoder
from nemo_war.generation.step_time import StepLoad, StepTimeModel
from nemo_war.simulation.replica import ReplicaConfig
from nemo_war.simulation.workload import (
    Caps,
    Session,
    ToolDelays,
    from_recorded,
    read_coding_sessions,
    sample,
)
from nemo_war.speculative.workload import read_trace

PRIOR = StepTimePrior(base=20, per_request=0.1, per_token=0.12, per_kilotoken=0.05)
STEP_TIME = StepTimeModel(PRIOR)
BLOCK, RUNNING, BATCHED = 16, 64, 2048
CAPS = Caps(turns=24)
"""Of coding sessions: beyond so many turns they are more of the same, and take longer over HTTP."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Sessions and the replicas that serve them.

    Attributes:
        trace: `tau` or `coding`.
        sessions: in all.
        replicas: number of them.
        kv_tokens: KV cache of each.
        speed: model seconds in a second of an HTTP run. On two cores with a load of 0.5 to 3, sticky took
            0.99 (scarce) and 1.04 (ample) of its makespan in process at 10 (tau, four replicas), and 1.01 at
            20 (coding scarce); at loads of 5 to 10 up to 1.5, so look at the load first. With 560 sessions
            on eight replicas it took 1.25 even at 5: their figures compare with each other only.
        concurrency: sessions that are live at once; None: all.
    """

    trace: str
    sessions: int
    replicas: int
    kv_tokens: int
    speed: float = 10.0
    concurrency: int | None = None

    @property
    def replica(self) -> ReplicaConfig:
        """Each of its replicas."""
        return ReplicaConfig(self.kv_tokens // BLOCK, BLOCK, RUNNING, BATCHED, STEP_TIME)


SCENARIOS = {
    "tau ample 4": Scenario("tau", 280, 4, 1_000_000),
    "tau scarce 4": Scenario("tau", 280, 4, 60_000),
    "tau scarcer 4": Scenario("tau", 280, 4, 30_000),
    "tau low ample 4": Scenario("tau", 24, 4, 1_000_000),
    "tau scarce 4 at 32": Scenario("tau", 280, 4, 60_000, concurrency=32),
    "tau scarce 4 at 560": Scenario("tau", 560, 4, 60_000, speed=5),
    "tau ample 8": Scenario("tau", 560, 8, 1_000_000, speed=5),
    "tau scarce 8": Scenario("tau", 560, 8, 60_000, speed=5),
    "coding ample 4": Scenario("coding", 64, 4, 4_000_000, speed=20),
    "coding scarce 4": Scenario("coding", 64, 4, 300_000, speed=20),
    "coding scarce 4 at 12": Scenario("coding", 64, 4, 300_000, speed=20, concurrency=12),
}
"""Sessions end with 5,000 tokens (tau) or 52,000 (coding) on average: the 32 and the 12 that are live at
once fit; all of 280 at once need several times what there is, and all of 560 twice that."""


class Workloads:
    """Sessions of the traces; tau-bench is read once."""

    def __init__(self, traces: Path, tokenizer: Path) -> None:
        self._traces = traces
        self._recorded = read_trace(traces / "tau_bench_airline.json", encoder(tokenizer))

    def of(self, scenario: Scenario, seed: int) -> list[Session]:
        """A scenario's sessions; the seed decides which, in what order, and how long their tools take."""
        if scenario.trace == "tau":
            return self.tau(scenario.sessions, seed)
        folder = self._traces / "kv_cache_tester"
        return read_coding_sessions(folder, scenario.sessions, seed, CAPS, ToolDelays())

    def tau(self, count: int, seed: int) -> list[Session]:
        """So many sessions of tau-bench."""
        return sample(from_recorded(self._recorded, ToolDelays(), seed), count, seed)


def oracle(scenario: Scenario, sessions: Sequence[Session]) -> float:
    """What hardly a schedule beats: the longest trajectory alone, or all work spread in full batches."""
    alone = [_seconds_alone(session) for session in sessions]
    token_s = (PRIOR.base / RUNNING + PRIOR.per_request + PRIOR.per_token) / 1e3
    work = token_s * sum(len(turn.output) for session in sessions for turn in session.turns)
    live = scenario.concurrency or len(sessions)
    return max(max(alone), sum(alone) / live, work / scenario.replicas)


def decoding_s(tokens: int) -> float:
    """Time of so many tokens where nothing else runs."""
    return tokens * STEP_TIME.predict(StepLoad(1, 1)) / 1e3


def _seconds_alone(session: Session) -> float:
    return sum(
        STEP_TIME.predict(StepLoad(1, len(turn.prompt))) / 1e3 + decoding_s(len(turn.output)) + turn.delay_s
        for turn in session.turns
    )
