"""Where NeMo-RL is: NEMO_RL_PATH names a checkout, as it is on no package index."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_PATH = os.environ.get("NEMO_RL_PATH")

if not _PATH or not (Path(_PATH) / "nemo_rl").is_dir():
    collect_ignore_glob = ["test_*.py"]
else:
    sys.path.insert(0, _PATH)
    os.environ |= {
        "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{_PATH}",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="session")
def model_folder() -> Path:
    from nemo_war.generation.embedded import model

    return model.resolve(model.BUNDLED)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """For tests that start engines; the others need not wait for Ray."""
    import ray

    environment = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    ray.init(num_gpus=4, num_cpus=8, include_dashboard=False, runtime_env={"env_vars": environment})
    yield
    ray.shutdown()
