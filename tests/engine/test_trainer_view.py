"""The trainer recomputes the rollout's logprobs: the error is the same with WAR and without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nemo_war.config import SpeculativeConfig, WarConfig
from nemo_war.generation.embedded.trainer import Sample, Trainer, TrainerConfig
from tests.engine.fleets import begun_copy, fleet, sample, statistics

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [
        ("float32", 1e-3),
        # Verifying several tokens at once rounds in another order than one by one, in any engine.
        pytest.param("bfloat16", 0.03, marks=pytest.mark.full),
    ],
)
async def test_generation_logprobs_are_as_close_to_the_trainers_with_war_as_without(
    model_folder: Path, precision: str, tolerance: float
) -> None:
    prompts = [begun_copy(model_folder, seed) for seed in range(3)]
    speculating = WarConfig(speculative=SpeculativeConfig(max_draft_tokens=8, max_running=16))
    errors = {}
    for name, war in (("stock", None), ("war", speculating)):
        async with fleet(model_folder, war=war, dtype=precision) as engines:
            # Not of exact length: `min_tokens` takes EOS out of the distribution, and so out of the logprobs.
            answers = [
                (prompt, answer)
                for prompt in prompts
                for answer in await sample(engines, 0, prompt, 48, 8, exact=False)
            ]
            if war:
                counted = await statistics(engines)
                assert counted["accepted_tokens"] > 100, "too little was drafted for this to mean anything"
        errors[name] = token_mult_prob_error(model_folder, answers, precision)
    print(f"token_mult_prob_error in {precision}: {errors}")
    assert abs(errors["war"] - errors["stock"]) < tolerance
    assert errors["war"] < 1 + 4 * tolerance


def token_mult_prob_error(model_folder: Path, answers: list, precision: str) -> float:
    """NeMo-RL's metric: mean over generated tokens of exp |trainer's logprob - generation's|; 1 is best."""
    samples = [
        Sample(
            token_ids=[*prompt, *answer.tokens],
            generated=[False] * len(prompt) + [True] * len(answer.tokens),
            logprobs=[0.0] * len(prompt) + list(answer.logprobs),
            reward=0.0,
            group="g",
        )
        for prompt, answer in answers
    ]
    recomputed = Trainer(model_folder, TrainerConfig(precision=precision)).logprobs(samples)
    differences = [
        np.abs(np.asarray(new)[-len(answer.logprobs) :] - np.asarray(answer.logprobs))
        for new, (_, answer) in zip(recomputed, answers, strict=True)
    ]
    return float(np.exp(np.concatenate(differences)).mean())
