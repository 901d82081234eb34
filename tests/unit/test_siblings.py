from __future__ import annotations

import pytest

from nemo_war.routing import siblings
from nemo_war.routing.siblings import Siblings


def placed(*turns: tuple[str, str, int]) -> Siblings:
    known = Siblings()
    for turn in turns:
        known.placed(*turn)
    return known


def test_siblings_are_where_another_one_of_the_group_is_or_was() -> None:
    known = placed(("g", "a", 0), ("g", "a", 0), ("g", "b", 2), ("h", "c", 1))
    assert known.where("g", "a") == [2]
    assert known.where("g", "b") == [0]
    assert known.where("g", "new") == [0, 2]
    assert known.where("h", "c") == []
    assert known.where("unheard of", "a") == []


def test_where_several_were_each_has_siblings() -> None:
    known = placed(("g", "a", 0), ("g", "b", 0), ("g", "a", 0))
    assert known.where("g", "a") == known.where("g", "b") == [0]


def test_a_lost_replica_and_a_new_step_forget() -> None:
    known = placed(("g", "a", 0), ("g", "b", 1))
    known.lost(0)
    assert known.where("g", "c") == [1]
    known.clear()
    assert known.where("g", "c") == []


def test_the_groups_that_came_first_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "_GROUPS", 2)
    known = placed(("g", "a", 0), ("h", "b", 1), ("i", "c", 2))
    assert [known.where(group, "new") for group in "ghi"] == [[], [1], [2]]
