"""The trainer recomputes the rollout's logprobs: the error is the same with WAR and without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nemo_war.config import SpeculativeConfig, WarConfig
from nemo_war.generation.embedded.trainer import Sample, Trainer, TrainerConfig
from tests.engine.fleets import begun_copy, fleet, sample, statistics

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


NOISE = 0.03
"""Nats; spread of the mean difference over some 900 tokens sampled anew, in bfloat16."""


async def test_generation_logprobs_are_as_close_to_the_trainers_with_war_as_without(
    model_folder: Path,
) -> None:
    prompts = [begun_copy(model_folder, seed) for seed in range(3)]
    differences = {}
    for name, war in (
        ("stock", None),
        ("war", WarConfig(speculative=SpeculativeConfig(max_draft_tokens=8, max_running=16))),
    ):
        async with fleet(model_folder, war=war) as engines:
            answers = [
                (prompt, answer) for prompt in prompts for answer in await sample(engines, 0, prompt, 48, 6)
            ]
            if war:
                counted = await statistics(engines)
                assert counted["accepted_tokens"] > 100, "too little was drafted for this to mean anything"
        differences[name] = trainer_differences(model_folder, answers)
    means = {name: np.minimum(values, 1.0).mean() for name, values in differences.items()}
    print(f"mean |difference| {means} nats; token_mult_prob_error of NeMo-RL:")
    print({name: round(float(np.exp(values).mean()), 4) for name, values in differences.items()})
    assert abs(means["war"] - means["stock"]) < NOISE
    assert means["war"] < 0.1


def trainer_differences(model_folder: Path, answers: list) -> np.ndarray:
    """|trainer's logprob - generation's| of each generated token, in nats."""
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
    recomputed = Trainer(model_folder, TrainerConfig()).logprobs(samples)
    parts = [
        np.abs(np.asarray(new)[-len(answer.logprobs) :] - np.asarray(answer.logprobs))
        for new, (_, answer) in zip(recomputed, answers, strict=True)
    ]
    return np.concatenate(parts)
