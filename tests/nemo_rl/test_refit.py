"""No KV of an older policy is used after a refit through NeMo-RL's own hooks; stock shows that it may be."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.engine.policies import as_bytes, perturbed
from tests.nemo_rl import world

pytestmark = pytest.mark.usefixtures("ray_cluster")

EQUAL, STALE = 2e-3, 0.02
"""Nats from a model that was given the new weights from the start."""


@pytest.fixture(scope="module")
def prompt(model_folder: Path) -> list[int]:
    text = " ".join(f"The {number}. word of a long text is here." for number in range(30))
    return world.tokenizer(model_folder).encode(text)


@pytest.fixture(scope="module", params=[None, {"speculative": {"max_draft_tokens": 8}}], ids=["stock", "war"])
def made(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Any]:
    config = world.generation_config(model_folder, True, request.param, max_new_tokens=160, ignore_eos=True)
    with world.generation(config, replicas=1) as each:
        yield each


def test_kv_after_a_refit_in_flight(made: Any, model_folder: Path, prompt: list[int], tmp_path: Path) -> None:
    weights = perturbed(model_folder, 0.05)
    (tmp_path / "weights").write_bytes(as_bytes(weights))
    first_logprob(made, prompt)  # its KV is cached
    running = threading.Thread(target=world.answered, args=(made, [prompt[:20]]))
    running.start()
    time.sleep(1.0)  # for its first tokens
    made.prepare_refit_info({"file": str(tmp_path / "weights")})
    assert ray.get(made.update_weights_from_collective()) == [True]
    assert made.invalidate_kv_cache(), "NeMo-RL is told that the caches are empty, true or not"
    token, logprob = first_logprob(made, prompt)
    running.join()
    gap = abs(logprob - fresh(model_folder, weights, prompt)[token])
    if type(made) is world.STOCK:
        assert gap > STALE, f"stock is {gap:.4f} nats off: its defect is gone, and so may be our remedy"
    else:
        assert gap < EQUAL, f"{gap:.4f} nats off"


def first_logprob(made: Any, prompt: list[int]) -> tuple[int, float]:
    """The likeliest next token, and its logprob, as the engine says."""
    tokens, logprobs = world.new(world.answered(made, [prompt], greedy=True)[0])
    return tokens[0], logprobs[0]


def fresh(model: Path, weights: Any, prompt: list[int]) -> torch.Tensor:
    """[vocabulary] logprobs of the next token under these weights, computed from nothing."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32)
    policy.load_state_dict(weights, strict=False)
    with torch.no_grad():
        return policy(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
