"""Which replicas deviate."""

from __future__ import annotations

import pytest

from nemo_war.generation.self_check import Probe, deviants, distance

ONE = {token: -1.0 - token / 10 for token in range(20)}
OTHER = {token: -1.3 - token / 10 for token in range(20)}


def sound(said: dict[int, float]) -> Probe:
    return Probe(said, said)


def test_where_all_agree_within_the_tolerance_nobody_deviates() -> None:
    near = {token: value + 0.009 for token, value in ONE.items()}
    assert deviants({0: sound(ONE), 1: sound(near), 2: Probe(near, ONE)}, 0.01) == {}
    assert deviants({}, 0.01) == {}
    assert deviants({3: sound(ONE)}, 0.01) == {}


def test_stale_kv_shows_on_the_replica_itself() -> None:
    found = deviants({0: sound(ONE), 1: Probe(OTHER, ONE)}, 0.01)
    assert list(found) == [1]
    assert found[1] == "has stale KV: its logprobs differ by 0.3 from those without cache"


def test_who_is_alone_with_what_it_says_deviates() -> None:
    assert list(deviants({0: sound(ONE), 1: sound(OTHER), 2: sound(ONE)}, 0.01)) == [1]


@pytest.mark.parametrize("said", [[ONE, OTHER], [ONE, ONE, OTHER, OTHER]])
def test_without_two_thirds_that_agree_nobody_is_believed(said: list[dict[int, float]]) -> None:
    assert list(deviants(dict(enumerate(map(sound, said))), 0.01)) == list(range(len(said)))


def test_other_likeliest_tokens_are_infinitely_far() -> None:
    assert distance(ONE, {token + 4: value for token, value in ONE.items()}) == float("inf")
    assert distance(ONE, {token: value for token, value in ONE.items() if token != 19}) == 0.0
