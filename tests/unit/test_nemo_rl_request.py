"""How a request carries its policy epoch and whose turn it is, whatever kind of prompt it has."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_war.generation.nemo_rl.request import announced, announcing, is_piecewise, salted
from nemo_war.metadata import KEY, TurnMetadata
from tests.double.engine import RequestOutputKind, SamplingParams

TURN = TurnMetadata("t", "g", turn=1)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", {"prompt": "text"}),
        ([1, 2], {"prompt_token_ids": [1, 2]}),
        ({"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [1, 2]}),
        ({"prompt": "text", "multi_modal_data": {"image": "i"}},) * 2,
        ({"prompt_token_ids": [1], "cache_salt": None}, {"prompt_token_ids": [1]}),
    ],
)
def test_a_prompt_gets_the_salt_of_its_epoch(prompt: Any, expected: dict[str, Any]) -> None:
    before = json.dumps(prompt)
    assert salted(prompt, 3) == {**expected, "cache_salt": "epoch-3"}
    assert json.dumps(prompt) == before, "the caller's prompt is its own"


def test_a_salt_of_the_callers_own_stays_part_of_it() -> None:
    assert salted({"prompt": "text", "cache_salt": "own"}, 3)["cache_salt"] == "epoch-3/own"


@pytest.mark.parametrize(("own", "expected"), [(None, "epoch-3"), ("", "epoch-3"), ("own", "epoch-3/own")])
def test_a_request_that_was_rendered_already_is_salted_itself(own: str | None, expected: str) -> None:
    request = SimpleNamespace(prompt_token_ids=[1], cache_salt=own)
    assert salted(request, 3) is request
    assert request.cache_salt == expected


def test_salts_of_different_epochs_differ_whatever_the_caller_adds() -> None:
    salts = {
        salted({"prompt": "", "cache_salt": own}, epoch)["cache_salt"]
        for epoch in (1, 11)
        for own in (None, "1", "epoch-1", "/")
    }
    assert len(salts) == 8


@pytest.mark.parametrize("extra", [None, {}, {"theirs": 1}])
def test_a_request_that_says_nothing_has_no_turn(extra: dict[str, Any] | None) -> None:
    assert announced(SamplingParams(extra_args=extra)) is None


def test_a_turn_survives_as_an_object_and_as_json() -> None:
    said = TURN.to_extra_args()
    assert announced(SamplingParams(extra_args=said)) == TURN
    assert announced(SamplingParams(extra_args={KEY: json.dumps(said[KEY])})) == TURN


@pytest.mark.parametrize("said", ["{", '"t"', "[]", "[" * 100_000, {"trajectory": "t", "colour": 1}])
def test_what_makes_no_sense_is_nothing_said(said: Any) -> None:
    assert announced(SamplingParams(extra_args={KEY: said})) is None


@pytest.mark.parametrize(
    ("kind", "piecewise"), [(RequestOutputKind.CUMULATIVE, False), (RequestOutputKind.DELTA, True)]
)
def test_outputs_that_hold_news_only_are_known(kind: RequestOutputKind, piecewise: bool) -> None:
    assert is_piecewise(SamplingParams(output_kind=kind)) is piecewise


def test_saying_whose_turn_it_is_leaves_shared_parameters_alone() -> None:
    params = SamplingParams(extra_args={"theirs": 1})
    told = announcing(params, TURN)
    assert announced(told) == TURN
    assert told.extra_args["theirs"] == 1
    assert params == SamplingParams(extra_args={"theirs": 1})
    assert announced(announcing(SamplingParams(), TURN)) == TURN
