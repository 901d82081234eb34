from __future__ import annotations

from typing import Any

import pytest

from nemo_war.config import SpeculativeConfig, WarConfig
from nemo_war.generation.nemo_rl.engine_arguments import PROPOSER, prepare

_THEIRS = "nemo_rl.models.generation.vllm.vllm_backend.VllmInternalWorkerExtension"
_OURS = "nemo_war.generation.nemo_rl.extension.WarWorkerExtension"
WAR = WarConfig(speculative=SpeculativeConfig(max_draft_tokens=7))
OFF = WarConfig(speculative=SpeculativeConfig(enabled=False))


def prepared(war: WarConfig, **changes: Any) -> dict[str, Any]:
    arguments = {"model": "m", "worker_extension_cls": _THEIRS, **changes}
    prepare(arguments, war)
    return arguments


@pytest.mark.parametrize("kind", ["", "WithCheckpointEngine"])
@pytest.mark.parametrize("war", [WAR, OFF])
def test_nemo_rls_extension_is_replaced_by_ours_that_extends_it(kind: str, war: WarConfig) -> None:
    assert prepared(war, worker_extension_cls=_THEIRS + kind)["worker_extension_cls"] == _OURS + kind


def test_an_extension_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"some\.Other is not one that WAR extends: VllmInternal"):
        prepared(WAR, worker_extension_cls="some.Other")


def test_the_drafter_is_added_with_its_settings() -> None:
    arguments = prepared(WAR, additional_config={"theirs": 1}, speculative_config=None)
    assert arguments["speculative_config"] == {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": 7,
    }
    assert arguments["additional_config"].pop("theirs") == 1
    assert SpeculativeConfig.model_validate(arguments["additional_config"]["war"]) == WAR.speculative


def test_without_drafts_nothing_but_the_extension_changes() -> None:
    theirs = {"speculative_config": {"method": "ngram"}, "additional_config": {"theirs": 1}}
    assert prepared(OFF, **theirs) == {"model": "m", "worker_extension_cls": _OURS, **theirs}
