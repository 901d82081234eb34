from __future__ import annotations

import os

import pytest

from nemo_war.config import SpeculativeConfig, WarConfig
from nemo_war.generation.embedded.engine import (
    PROPOSER,
    STOCK_EXTENSION,
    WAR_EXTENSION,
    EngineSpec,
    cores_of,
)


def test_a_stock_engine_gets_nothing_of_ours_but_the_refit_extension() -> None:
    arguments = EngineSpec("/m", {"max_model_len": 512}, None).engine_arguments(0)
    assert arguments["worker_extension_cls"] == STOCK_EXTENSION
    assert "speculative_config" not in arguments
    assert "additional_config" not in arguments


def test_a_war_engine_gets_the_proposer_and_its_settings() -> None:
    war = WarConfig(speculative=SpeculativeConfig(max_draft_tokens=7))
    arguments = EngineSpec("/m", {}, war).engine_arguments(0)
    assert arguments["speculative_config"] == {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": 7,
    }
    assert arguments["worker_extension_cls"] == WAR_EXTENSION
    assert SpeculativeConfig.model_validate(arguments["additional_config"]["war"]) == war.speculative


@pytest.mark.parametrize(
    "war", [WarConfig(enabled=False), WarConfig(speculative=SpeculativeConfig(enabled=False))]
)
def test_without_speculation_the_engine_keeps_its_own_scheduling(war: WarConfig) -> None:
    spec = EngineSpec("/m", {}, war)
    assert not spec.speculates
    assert "speculative_config" not in spec.engine_arguments(0)


def test_replicas_sample_from_seeds_of_their_own() -> None:
    spec = EngineSpec("/m", {}, None, seed=40)
    assert [spec.engine_arguments(replica)["seed"] for replica in range(3)] == [40, 41, 42]


def test_cores_are_shared_out_and_wrap_around_when_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6, 7})
    assert [cores_of(replica, 2) for replica in range(3)] == [[4, 5], [6, 7], [4, 5]]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert [cores_of(replica, 2) for replica in range(2)] == [[3], [3]]
