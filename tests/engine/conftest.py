"""One Ray instance and one model folder for all engine tests; engines are per module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from nemo_war.generation.embedded import model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return model.resolve(model.BUNDLED)


@pytest.fixture(scope="module", autouse=True)
def ray_instance() -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=2 * 1024**3,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    yield
    ray.shutdown()
