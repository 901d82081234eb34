from __future__ import annotations

from collections import Counter

from nemo_war.generation.embedded.dataset import Dataset
from nemo_war.generation.embedded.environments import build
from nemo_war.generation.embedded.environments.calculator import CalculatorConfig
from nemo_war.generation.embedded.environments.file_edit import FileEditConfig

ENVIRONMENTS = {
    "file_edit": build("file_edit", FileEditConfig()),
    "calculator": build("calculator", CalculatorConfig()),
}


def dataset(size: int = 6, seed: int = 1, **weights: float) -> Dataset:
    return Dataset(ENVIRONMENTS, weights or {"file_edit": 2.0, "calculator": 1.0}, size, seed)


def names(prompts: list) -> list[str]:
    return [prompt.task.name for prompt in prompts]


def test_prompts_are_shared_out_by_weight() -> None:
    drawn = dataset().step(0, 6)
    assert Counter(prompt.environment for prompt in drawn) == {"file_edit": 4, "calculator": 2}


def test_every_epoch_draws_each_prompt_once_in_an_order_of_its_own() -> None:
    data = dataset()
    first = names(data.step(0, 3)) + names(data.step(1, 3))
    second = names(data.step(2, 3)) + names(data.step(3, 3))
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 6
    assert first != second


def test_the_same_seed_gives_the_same_prompts() -> None:
    assert dataset().step(5, 3) == dataset().step(5, 3)
    assert names(dataset(seed=2).step(0, 3)) != names(dataset().step(0, 3))


def test_validation_never_sees_a_training_prompt() -> None:
    training = {str(prompt.task.messages) for step in range(4) for prompt in dataset().step(step, 3)}
    assert not training & {str(prompt.task.messages) for prompt in dataset().validation(20)}
