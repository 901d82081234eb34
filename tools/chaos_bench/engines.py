"""What the chaos is brought on: fakes of vLLM's interface, or the real one with the bundled model."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nemo_war.config import (
    ExchangeConfig,
    HealthConfig,
    HistoryConfig,
    RefitConfig,
    SpeculativeConfig,
    WarConfig,
)
from nemo_war.generation.embedded.engine import EngineSpec
from nemo_war.generation.scheduling.heartbeat import Patience
from tools.chaos_bench import faults, model
from tools.chaos_bench.freshness import FakeModel
from tools.chaos_bench.kinds import LATE_S, InFlight
from tools.chaos_bench.replicas import ObedientReplica, PreparedReplica, UnsaltedReplica
from tools.chaos_bench.victim import Pace
from tools.chaos_bench.workload import Sizes


class Engines(Protocol):
    """The engines of a run.

    Attributes:
        real: whether they are vLLM's own.
        spec: of every one.
        replica_class: what each actor runs.
        sizes: of the work that they are up to.
        health: of the fleet.
        orders: that always hold.
        object_store_bytes: room for the weights of a few policies.
        pace: how long things take.
        patience: with a scheduler that does not answer.
    """

    real: bool
    spec: EngineSpec
    replica_class: type
    sizes: Sizes
    health: HealthConfig
    orders: dict[str, Any]
    object_store_bytes: int
    pace: Pace
    patience: Patience

    def environment(self, orders: Path) -> dict[str, str]:
        """Variables for the processes; called before anything is started."""
        ...

    def refit(self, in_flight: InFlight) -> RefitConfig:
        """How weights change."""
        ...

    def policy(self, epoch: int) -> bytes:
        """The weights of an epoch, as a safetensors file; called for one epoch after the other."""
        ...

    @property
    def model(self) -> FakeModel | None:
        """What tells policies apart, token by token; None where nothing does."""
        ...


@dataclass
class FakeEngines:
    """Small caches, short turns, drafts in every step."""

    sabotage: bool = False
    real: bool = field(default=False, init=False)
    object_store_bytes: int = field(default=256 * 2**20, init=False)
    pace: Pace = field(default=Pace(0.8, 90.0, 0.05, 0.3), init=False)
    patience: Patience = field(default=Patience(0.2, 1.0, 60.0, 3.0), init=False)

    def __post_init__(self) -> None:
        engine = {
            "block_size": 16,
            "max_model_len": 512,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 256,
            "num_gpu_blocks_override": 97,
        }
        speculative = SpeculativeConfig(
            max_draft_tokens=6,
            max_running=64,  # drafts always: the price depends on time
            history=HistoryConfig(max_tokens=8192, exchange=ExchangeConfig(timeout_s=2.0)),
        )
        # Engines know their orders by their own seeds, which are the replicas' numbers.
        self.spec = EngineSpec("made-up", engine, WarConfig(speculative=speculative), seed=0)
        self.replica_class = UnsaltedReplica if self.sabotage else PreparedReplica
        self.sizes = Sizes(
            tasks=8,
            groups=4,
            siblings=4,
            prompt=(20, 90),
            turns=(1, 4),
            output=(1, 40),
            observation=(1, 20),
            tokens=(model.FIRST_TOKEN, 1024),
        )
        self.health = HealthConfig(probe_interval_s=0.5, probe_timeout_s=3.0, max_restarts=1000)
        self.orders = {"step_ms": 4} | ({"pretend_reset": 10**9} if self.sabotage else {})
        self._digests = {0: model.digest_of_folder(self.spec.model)}

    def environment(self, orders: Path) -> dict[str, str]:
        sys.path.insert(0, str(faults.FAKE))  # an error that comes from a replica names classes of vLLM's
        return faults.environment(orders)

    def refit(self, in_flight: InFlight) -> RefitConfig:
        return RefitConfig(
            in_flight=in_flight, on_failure="continue", drain_timeout_s=6.0, update_timeout_s=LATE_S - 1.5
        )

    def policy(self, epoch: int) -> bytes:
        file = model.weights_file(epoch)
        self._digests[epoch] = model.digest_of_file(file)
        return file

    @property
    def model(self) -> FakeModel:
        return FakeModel(self._digests, 1024, 2, self.spec.engine["max_model_len"])


@dataclass
class RealEngines:
    """vLLM on the CPU in float32, so that logprobs of equal weights are equal but for their last digits."""

    real: bool = field(default=True, init=False)
    model: None = field(default=None, init=False)
    object_store_bytes: int = field(default=2 * 2**30, init=False)
    pace: Pace = field(default=Pace(4.0, 600.0, 0.5, 20.0), init=False)
    patience: Patience = field(default=Patience(), init=False)

    def __post_init__(self) -> None:
        from nemo_war.generation.embedded.model import BUNDLED, resolve

        self._folder = resolve(BUNDLED)
        engine = {
            "block_size": 32,
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 1024,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 2**28,
            "enable_prefix_caching": True,
        }
        war = WarConfig(speculative=SpeculativeConfig(max_draft_tokens=4))
        self.spec = EngineSpec(str(self._folder), engine, war)
        self.replica_class = ObedientReplica
        self.sizes = Sizes(
            tasks=6,
            groups=2,
            siblings=4,
            prompt=(60, 200),
            turns=(1, 3),
            output=(4, 48),
            observation=(4, 20),
            tokens=(100, 40_000),
        )
        self.health = HealthConfig(probe_interval_s=1.0, probe_timeout_s=20.0, max_restarts=1000)
        self.orders: dict[str, Any] = {}
        self._policies: dict[int, bytes] = {}

    def environment(self, orders: Path) -> dict[str, str]:
        return {"PYTHONPATH": str(Path(__file__).parents[2]), faults.VARIABLE: str(orders)}

    def refit(self, in_flight: InFlight) -> RefitConfig:
        return RefitConfig(
            in_flight=in_flight, on_failure="continue", drain_timeout_s=120.0, update_timeout_s=90.0
        )

    def policy(self, epoch: int) -> bytes:
        """One of two policies in turns, neither being that which the engines start with."""
        which = epoch % 2
        if which not in self._policies:
            self._policies[which] = _perturbed(self._folder, seed=which)
        return self._policies[which]


def _perturbed(folder: Path, seed: int, scale: float = 0.08) -> bytes:
    """The model's weights, with noise of this share of each matrix's spread."""
    import torch
    from safetensors.torch import load_file, save

    generator = torch.Generator().manual_seed(seed)
    return save(
        {
            name: weight
            if weight.ndim != 2
            else (
                weight.float() + scale * weight.float().std() * torch.randn(weight.shape, generator=generator)
            ).to(weight.dtype)
            for name, weight in load_file(folder / "model.safetensors").items()
        }
    )
