from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from tiny_model import write_tiny_model
from transformers import AutoModelForCausalLM

from nemo_war.generation.embedded.policy_logprobs import Sample
from nemo_war.generation.embedded.trainer import Trainer, TrainerConfig, clipped_surrogate

EXACT = TrainerConfig(lr=1e-2, weight_decay=0.0, precision="float32")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The model is so small that threads spend their time meeting each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[True, False], ids=["tied", "untied"], scope="module")
def model_dir(request, tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), tied=request.param)


def sample(seed: int, length: int, reward: float, group: str = "g") -> Sample:
    """A made-up trajectory of two turns with an observation between them."""
    rng = np.random.default_rng(seed)
    generated = [length // 3 <= at and at % 5 != 0 for at in range(length)]
    return Sample(rng.integers(0, 64, length).tolist(), generated, [0.0] * length, reward, group)


def on_policy(trainer: Trainer, samples: list[Sample]) -> list[Sample]:
    """The samples as if the trainer's own weights had sampled them."""
    return [
        replace(sample, logprobs=values.tolist())
        for sample, values in zip(samples, trainer.logprobs(samples), strict=True)
    ]


SAMPLES = [sample(1, 17, 1.0), sample(2, 30, 0.0), sample(3, 23, 0.0), sample(4, 9, 0.5)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_naive_recomputation(model_dir: Path, temperature: float) -> None:
    trainer = Trainer(model_dir, replace(EXACT, temperature=temperature))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for given, values in zip(SAMPLES, trainer.logprobs(SAMPLES), strict=True):
        ids = torch.tensor([given.token_ids])
        with torch.no_grad():
            table = (model(ids).logits[0] / temperature).log_softmax(-1)
        naive = [
            table[at - 1, token].item() if given.generated[at] else 0.0
            for at, token in enumerate(given.token_ids)
        ]
        assert values == pytest.approx(naive, abs=1e-5)


def test_the_loss_falls_and_the_rewarded_trajectory_becomes_likelier(model_dir: Path) -> None:
    trainer = Trainer(model_dir, replace(EXACT, clip_low=0.99, clip_high=100.0))
    samples = on_policy(trainer, SAMPLES)
    losses = [trainer.update(samples).loss for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1
    before, after = sum(samples[0].logprobs), trainer.logprobs(samples)[0].sum()
    assert after > before + 1.0


def test_one_update_moves_the_better_and_the_worse_sibling_apart(model_dir: Path) -> None:
    trainer = Trainer(model_dir, EXACT)
    samples = on_policy(trainer, [sample(1, 17, 1.0), sample(2, 17, 0.0)])
    before = [sum(one.logprobs) for one in samples]
    trainer.update(samples)
    after = [values.sum() for values in trainer.logprobs(samples)]
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_the_split_into_micro_batches_does_not_matter(model_dir: Path) -> None:
    def run(size: int) -> tuple[float, float]:
        trainer = Trainer(model_dir, replace(EXACT, micro_batch_size=size))
        stats = trainer.update([replace(one, logprobs=[-1.0] * len(one.logprobs)) for one in SAMPLES])
        return stats.loss, stats.grad_norm

    assert run(1) == pytest.approx(run(4), rel=1e-4)


def test_agreement_with_the_rollout_reads_one_and_a_factor_of_two_reads_two(model_dir: Path) -> None:
    trainer = Trainer(model_dir, replace(EXACT, lr=0.0))
    samples = on_policy(trainer, SAMPLES)
    assert trainer.update(samples).logprob_error == pytest.approx(1.0, abs=1e-5)
    halved = [replace(one, logprobs=[value - np.log(2.0) for value in one.logprobs]) for one in samples]
    assert trainer.update(halved).logprob_error == pytest.approx(2.0, rel=1e-4)


def test_the_clip_takes_the_gradient_only_where_the_ratio_has_gone_the_wanted_way() -> None:
    logprobs = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])).requires_grad_()
    worth = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    losses, clipped = clipped_surrogate(logprobs, torch.zeros(5), worth, clip_low=0.2, clip_high=0.3)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([-1.3, 1.5, -0.5, 0.8, -1.1])
    assert clipped.tolist() == [True, False, False, True, False]
    assert logprobs.grad.tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0, -1.1])


def test_a_batch_whose_every_ratio_is_clipped_gives_no_gradient(model_dir: Path) -> None:
    trainer = Trainer(model_dir, EXACT)
    rewarded, other = on_policy(trainer, [sample(1, 17, 1.0), sample(2, 17, 0.0)])
    stats = trainer.update(
        [
            replace(rewarded, logprobs=[value - 1.0 for value in rewarded.logprobs]),
            replace(other, logprobs=[value + 1.0 for value in other.logprobs]),
        ]
    )
    assert stats.clipped_share == 1.0
    assert stats.grad_norm == 0.0


def test_a_step_without_advantages_changes_nothing_and_says_so(model_dir: Path) -> None:
    trainer = Trainer(model_dir, replace(EXACT, weight_decay=0.1))
    samples = on_policy(trainer, SAMPLES)
    trainer.update(samples)  # gives the optimiser moments that could move the weights
    before = trainer.state_bytes()
    stats = trainer.update([replace(one, reward=0.3) for one in samples])
    assert trainer.state_bytes() == before
    assert (stats.stepped, stats.groups, stats.skipped_groups) == (False, 1, 1)
    assert stats.logprob_error > 1.0


def test_a_group_without_advantages_is_skipped_beside_one_that_has_them(model_dir: Path) -> None:
    trainer = Trainer(model_dir, EXACT)
    equal = [sample(5, 12, 1.0, "equal"), sample(6, 14, 1.0, "equal")]
    stats = trainer.update(on_policy(trainer, [*SAMPLES, *equal]))
    assert (stats.stepped, stats.groups, stats.skipped_groups) == (True, 2, 1)


def test_trajectories_with_nothing_generated_are_a_valid_step(model_dir: Path) -> None:
    silent = [Sample([1, 2], [False, False], [0.0, 0.0], reward, "g") for reward in (0.0, 1.0)]
    trainer = Trainer(model_dir, EXACT)
    before = trainer.state_bytes()
    stats = trainer.update(silent)
    assert not stats.stepped
    assert trainer.state_bytes() == before


def test_weights_round_trip_through_safetensors_under_the_names_of_the_file(model_dir: Path) -> None:
    trainer = Trainer(model_dir, TrainerConfig(lr=1e-2))
    source = safetensors.torch.load_file(model_dir / "model.safetensors")
    untouched = safetensors.torch.load(trainer.state_bytes())
    assert untouched.keys() == source.keys()
    assert all(torch.equal(untouched[name], source[name]) for name in source)
    assert {weight.dtype for weight in untouched.values()} == {torch.bfloat16}

    trainer.update(on_policy(trainer, SAMPLES))
    reloaded = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    reloaded.load_state_dict(safetensors.torch.load(trainer.state_bytes()), strict=False)
    reloaded.save_pretrained(model_dir / "trained")
    ours, theirs = (
        one.logprobs(SAMPLES) for one in (trainer, Trainer(model_dir / "trained", TrainerConfig()))
    )
    assert all(np.array_equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_steps_too_small_for_bfloat16_add_up_in_the_masters(model_dir: Path) -> None:
    trainer = Trainer(model_dir, TrainerConfig(lr=1e-4, weight_decay=0.0))
    samples = on_policy(trainer, SAMPLES)

    def moved(before: bytes, after: bytes) -> float:
        old, new = safetensors.torch.load(before), safetensors.torch.load(after)
        return sum(int((old[name] != new[name]).sum()) for name in old) / sum(map(torch.numel, old.values()))

    start = trainer.state_bytes()
    trainer.update(samples)
    once = moved(start, trainer.state_bytes())
    for _ in range(5):
        trainer.update(samples)
    assert moved(start, trainer.state_bytes()) > 2 * once


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sample([1, 2], [False], [0.0, 0.0], 0.0, "g"), "must be equally many"),
        (lambda: Sample([1, 2], [True, True], [0.0, 0.0], 0.0, "g"), "has no context"),
    ],
)
def test_samples_that_make_no_sense_are_refused(make: Callable[[], Sample], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
