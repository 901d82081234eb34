"""Our block in NeMo-RL's configuration, and what may not stand beside it."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_war.config import WarConfig
from nemo_war.errors import ConfigError
from nemo_war.generation.nemo_rl.block import conflicts, war_of
from tests.double.behaviours import configuration

DRAFTS, NO_DRAFTS = {"speculative": {"enabled": True}}, {"speculative": {"enabled": False}}
AGAINST_WAR = [
    ({"backend": "sglang"}, "policy.generation.backend"),
    ({"quant_cfg": "NVFP4_DEFAULT_CFG"}, "policy.generation.quant_cfg"),
    ({"vllm_cfg": {"enable_prefix_caching": False}}, "policy.generation.vllm_cfg.enable_prefix_caching"),
]
WITHOUT_EFFECT = [
    ({"refit": {"in_flight": "pause"}}, "policy.generation.war.refit.in_flight"),
    ({"health": {"max_restarts": 5}}, "policy.generation.war.health.max_restarts"),
]
AGAINST_DRAFTS = [
    (
        {"vllm_kwargs": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}},
        "policy.generation.vllm_kwargs.speculative_config",
    ),
    ({"vllm_kwargs": {"async_scheduling": True}}, "policy.generation.vllm_kwargs.async_scheduling"),
    ({"vllm_kwargs": {"logits_processors": ["a"]}}, "policy.generation.vllm_kwargs.logits_processors"),
    ({"vllm_cfg": {"pipeline_parallel_size": 2}}, "policy.generation.vllm_cfg.pipeline_parallel_size"),
]
FINE = [
    {"vllm_cfg": {"enable_prefix_caching": True}},
    {"vllm_cfg": {"enable_prefix_caching": None}},
    {"vllm_kwargs": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 0}}},
    {"vllm_kwargs": {"speculative_config": None, "async_scheduling": False, "logits_processors": []}},
    {"vllm_kwargs": None, "vllm_cfg": None, "quant_cfg": None},
]


def test_without_a_block_war_is_off() -> None:
    assert not war_of(configuration()).enabled
    assert not war_of(configuration(war=None)).enabled


def test_an_empty_block_is_war_with_its_defaults() -> None:
    assert war_of(configuration(war={})) == WarConfig()


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ({"speculativ": {}}, "policy.generation.war.speculativ"),
        ({"speculative": {"max_draft_tokens": 0}}, "policy.generation.war.speculative.max_draft_tokens"),
        ({"routing": {"policy": "best"}}, "policy.generation.war.routing.policy"),
    ],
)
def test_a_mistake_in_the_block_is_named_by_its_dotted_key(block: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        war_of(configuration(war=block))
    assert raised.value.key == key


@pytest.mark.parametrize("war", [DRAFTS, NO_DRAFTS])
@pytest.mark.parametrize(("changes", "key"), AGAINST_WAR)
def test_what_contradicts_war_is_refused(changes: Any, key: str, war: Any) -> None:
    with pytest.raises(ConfigError, match=r"war\.enabled=false") as raised:
        war_of(configuration(war=war, **changes))
    assert raised.value.key == key


@pytest.mark.parametrize(("war", "key"), WITHOUT_EFFECT)
def test_a_key_of_ours_that_nemo_rl_decides_is_refused_unless_it_is_the_default(war: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=f"remove {key}") as raised:
        war_of(configuration(war=war))
    assert raised.value.key == key
    assert war_of(configuration(war={"refit": {"in_flight": "drain"}, "health": {}})).enabled


@pytest.mark.parametrize(("changes", "key"), AGAINST_DRAFTS)
def test_what_contradicts_drafts_is_refused_and_fine_without_them(changes: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=r"war\.speculative\.enabled=false") as raised:
        war_of(configuration(war=DRAFTS, **changes))
    assert raised.value.key == key
    assert war_of(configuration(war=NO_DRAFTS, **changes)).enabled


@pytest.mark.parametrize(("changes", "_"), AGAINST_WAR + AGAINST_DRAFTS)
def test_where_war_is_off_nothing_contradicts_it(changes: Any, _: str) -> None:
    assert not war_of(configuration(war={"enabled": False}, **changes)).enabled


@pytest.mark.parametrize("changes", FINE)
def test_what_is_not_set_or_switched_off_contradicts_nothing(changes: Any) -> None:
    assert war_of(configuration(war=DRAFTS, **changes)).enabled


def test_several_conflicts_are_counted() -> None:
    changes = {"vllm_kwargs": {"async_scheduling": True, "logits_processors": ["a"]}}
    assert len(list(conflicts(configuration(**changes), WarConfig()))) == 2
    with pytest.raises(ConfigError, match="and 1 more"):
        war_of(configuration(war={}, **changes))
