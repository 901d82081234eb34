from __future__ import annotations

import json

import pytest

from nemo_war.metadata import TurnMetadata


def test_metadata_survives_the_way_through_a_request() -> None:
    metadata = TurnMetadata("t", "g", turn=3, epoch=2, critical=True, remaining=40, learn=False)
    assert TurnMetadata.from_extra_args(json.loads(json.dumps(metadata.to_extra_args()))) == metadata


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}])
def test_a_request_without_metadata_has_none(extra_args: dict | None) -> None:
    assert TurnMetadata.from_extra_args(extra_args) is None


@pytest.mark.parametrize(
    ("war", "message"),
    [
        ({"trajectory": "t"}, "group"),
        ({"trajectory": "t", "group": "g", "colour": 1}, "unknown fields"),
        ("t", "must be a mapping"),
    ],
)
def test_foreign_metadata_is_refused(war: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TurnMetadata.from_extra_args({"war": war})
