"""The double of NeMo-RL does what the contract says of NeMo-RL, and is as old as the contract."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest
from interfaces import interfaces

from nemo_war.generation.nemo_rl.contract import check
from tests.double import engine, stamp
from tests.double.behaviours import Behaviours

VLLM = importlib.util.find_spec("vllm")
ENGINES = {
    "FakeAsyncLLM": ("v1/engine/async_llm.py", "AsyncLLM"),
    "FakeLLM": ("entrypoints/llm.py", "LLM"),
    "FakeLLMEngine": ("v1/engine/llm_engine.py", "LLMEngine"),
}


def test_the_double_has_every_name_of_the_contract() -> None:
    assert check(importlib.import_module) == []


def test_nemo_rl_was_held_against_the_contract_as_it_is() -> None:
    assert stamp.FILE.read_text().strip() == stamp.digest(), (
        "the double is older than the contract: run `python -m tests.double.stamp` where there is NeMo-RL"
    )


@pytest.mark.skipif(VLLM is None, reason="needs vLLM's source")
def test_the_engines_take_no_more_than_vllms_do() -> None:
    assert VLLM is not None
    assert VLLM.origin is not None
    root = Path(VLLM.origin).parent
    real = interfaces((root / path, name) for path, name in ENGINES.values())
    ours = interfaces((Path(engine.__file__), name) for name in ENGINES)
    for name, theirs, double in zip(ENGINES, real, ours, strict=True):
        for method, parameters in double.items():
            if getattr(vars(engine)[name], method, None) is not None:
                assert set(parameters) <= set(theirs[method]), f"{name}.{method}"


class TestTheDouble(Behaviours):
    pass
