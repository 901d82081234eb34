"""vLLM engine arguments and process environment of an embedded replica."""

from __future__ import annotations

import getpass
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_war.config import WarConfig
from nemo_war.errors import UserError
from nemo_war.generation.step_time import StepTimeModel

STOCK_EXTENSION = "nemo_war.generation.extension.RefitExtension"
WAR_EXTENSION = "nemo_war.generation.extension.WarExtension"
PROPOSER = "nemo_war.speculative.proposer.SuffixProposer"


@dataclass(frozen=True)
class EngineSpec:
    """One replica's engine, stock or WAR.

    Attributes:
        model: local HF folder.
        engine: vLLM engine arguments as the configuration gives them.
        war: the WAR block; None for a stock engine at vLLM's own defaults.
        temperature: sampling temperature of every turn.
        stop_token_ids: stop tokens of every turn besides EOS.
        seed: of sampling; replica i gets this + i, or siblings on two replicas would be twins.
        resumes: whether what it learned comes from a checkpoint, and not from an earlier run's history.
        extension: worker extension class, by dotted path; None picks the right one.
    """

    model: str
    engine: dict[str, Any]
    war: WarConfig | None
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    resumes: bool = False
    extension: str | None = field(default=None)

    @property
    def speculates(self) -> bool:
        """Whether this engine gets our proposer."""
        return self.war is not None and self.war.enabled and self.war.speculative.enabled

    @property
    def ranks(self) -> int:
        """Processes that compute together."""
        return int(self.engine.get("tensor_parallel_size", 1))

    def step_time(self) -> StepTimeModel | None:
        """What is believed of this engine's step times before it ran; None for a stock engine."""
        return None if self.war is None else StepTimeModel(self.war.speculative.step_time_prior)

    def engine_arguments(self, replica: int) -> dict[str, Any]:
        """Keyword arguments of `AsyncEngineArgs`."""
        arguments = dict(self.engine) | {
            "model": self.model,
            "seed": self.seed + replica,
            "logprobs_mode": "processed_logprobs",  # of what was sampled from, temperature applied
            "worker_extension_cls": self.extension or (WAR_EXTENSION if self.speculates else STOCK_EXTENSION),
            "disable_log_stats": True,
        }
        if self.speculates:
            assert self.war is not None
            arguments["speculative_config"] = {
                "method": "custom_class",
                "model": PROPOSER,
                "num_speculative_tokens": self.war.speculative.max_draft_tokens,
            }
            arguments["additional_config"] = {"war": self.war.speculative.model_dump(mode="json")}
        return arguments


def cores_of(replica: int, per_replica: int) -> list[int]:
    """CPU cores of a replica: its own share of those this process may use, wrapping around when short."""
    usable = sorted(os.sched_getaffinity(0))
    first = replica * per_replica
    return sorted({usable[(first + i) % len(usable)] for i in range(min(per_replica, len(usable)))})


def process_environment(cores: list[int], ranks: int = 1) -> dict[str, str]:
    """Variables that must stand before the replica's interpreter starts.

    Args:
        cores: of the replica.
        ranks: processes that share them; each has its own while there are enough.

    Raises:
        UserError: Intel's OpenMP is missing from this Python environment.
    """
    shares = [cores[rank::ranks] or cores for rank in range(ranks)]
    return {
        # vLLM's CPU kernels run several times slower on small uneven batches (what
        # speculation makes) with GNU's OpenMP.
        "LD_PRELOAD": str(libiomp()),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares),
        "OMP_NUM_THREADS": str(len(shares[0])),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_CONFIGURE_LOGGING": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def temporary_files_in(folder: Path) -> dict[str, str]:
    """Variables by which vLLM leaves there what it unlinks only if it ends in order: sockets, mostly."""
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"  # as torch has it
    return {
        "TMPDIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(cache)),
    }


def libiomp() -> Path:
    """Intel's OpenMP library, which the CPU build of vLLM brings along."""
    for folder in (Path(sys.prefix) / "lib", Path(sys.prefix) / "lib64"):
        if (library := folder / "libiomp5.so").exists():
            return library
    raise UserError(
        f"libiomp5.so is not under {sys.prefix}/lib: vLLM on the CPU needs it; "
        "install it with `pip install intel-openmp` in this environment"
    )
