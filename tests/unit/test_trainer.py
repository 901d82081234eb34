from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from nemo_war.generation.embedded.policy_logprobs import Sample
from nemo_war.generation.embedded.trainer import Trainer, TrainerConfig

CONFIG = TrainerConfig(
    lr=1e-2, weight_decay=0.0, precision="float32", normalize_rewards=False, leave_one_out=False
)
VOCABULARY = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    made = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(made)
    return made


def naive(folder: Path, sample: Sample, temperature: float = 1.0) -> np.ndarray:
    """Logprobs of generated tokens by the plainest means."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([sample.token_ids])).logits[0] / temperature
    logprobs = torch.log_softmax(logits, -1)
    at = [place for place, generated in enumerate(sample.generated) if generated]
    return np.array([logprobs[place - 1, sample.token_ids[place]].item() for place in at])


def sample(seed: int, reward: float, length: int = 12, prompt: int = 4, group: str = "g") -> Sample:
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, VOCABULARY, length).tolist()
    generated = [at >= prompt for at in range(length)]
    return Sample(tokens, generated, [0.0] * length, reward, group)


def with_logprobs(folder: Path, of: Sample) -> Sample:
    values = iter(naive(folder, of).tolist())
    return replace(of, logprobs=[next(values) if generated else 0.0 for generated in of.generated])


def generated_logprobs(trainer: Trainer, of: Sample) -> np.ndarray:
    (values,) = trainer.logprobs([of])
    return np.asarray(values)[-sum(of.generated) :]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_naive_recomputation(folder: Path, temperature: float) -> None:
    trainer = Trainer(folder, replace(CONFIG, temperature=temperature))
    for one in (sample(1, 0.0), sample(2, 0.0, length=30, prompt=7)):
        assert generated_logprobs(trainer, one) == pytest.approx(naive(folder, one, temperature), abs=1e-4)


def test_an_update_makes_what_was_rewarded_likelier(folder: Path) -> None:
    trainer = Trainer(folder, CONFIG)
    good, bad = with_logprobs(folder, sample(1, 1.0)), with_logprobs(folder, sample(2, 0.0))
    before = [generated_logprobs(trainer, each).sum() for each in (good, bad)]
    stats = trainer.update([good, bad])
    after = [generated_logprobs(trainer, each).sum() for each in (good, bad)]
    assert stats.stepped
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_siblings_with_equal_rewards_leave_the_weights_as_they_are(folder: Path) -> None:
    trainer = Trainer(folder, CONFIG)
    before = trainer.state_bytes()
    stats = trainer.update([with_logprobs(folder, sample(seed, 0.5)) for seed in (1, 2)])
    assert (stats.stepped, stats.skipped_groups, stats.groups) == (False, 1, 1)
    assert trainer.state_bytes() == before


def test_a_ratio_beyond_the_clip_gives_no_gradient(folder: Path) -> None:
    trainer = Trainer(folder, CONFIG)
    good, bad = (with_logprobs(folder, sample(seed, reward)) for seed, reward in ((1, 1.0), (2, 0.0)))
    # The rollout found the good one far less likely, and the bad one far likelier, than the policy does now.
    good = replace(good, logprobs=[value - 1.0 for value in good.logprobs])
    bad = replace(bad, logprobs=[value + 1.0 for value in bad.logprobs])
    stats = trainer.update([good, bad])
    assert stats.clipped_share == pytest.approx(1.0)
    assert stats.grad_norm == pytest.approx(0.0, abs=1e-6)


def test_the_logprob_error_is_the_mean_factor_between_two_probabilities(folder: Path) -> None:
    trainer = Trainer(folder, CONFIG)
    exact = [with_logprobs(folder, sample(seed, float(seed))) for seed in (1, 2)]
    assert trainer.update(exact).logprob_error == pytest.approx(1.0, abs=1e-4)
    trainer = Trainer(folder, CONFIG)
    off = [replace(each, logprobs=[value - 0.1 for value in each.logprobs]) for each in exact]
    assert trainer.update(off).logprob_error == pytest.approx(np.exp(0.1), abs=1e-3)


def test_the_weights_leave_under_the_names_of_the_models_own_file(folder: Path) -> None:
    trainer = Trainer(folder, CONFIG)
    sent = safetensors.torch.load(trainer.state_bytes())
    file = safetensors.torch.load_file(folder / "model.safetensors")
    assert set(sent) == set(file)
    for name, tensor in sent.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.allclose(tensor.float(), file[name].float(), atol=0.01)


def test_a_sample_whose_parts_differ_in_length_is_refused() -> None:
    with pytest.raises(ValueError, match="must be equally many"):
        Sample([1, 2], [False], [0.0, 0.0], 0.0, "g")
