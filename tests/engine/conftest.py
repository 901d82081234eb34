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


@pytest.fixture(scope="session")
def tiny_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that two ranks can share (the bundled one has nine heads) and that is fast."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("tiny") / "model"
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(
        model_folder, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    return folder


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
