from __future__ import annotations

from types import SimpleNamespace

import pytest

from nemo_war.generation.embedded.sampling import answer_of, prompt_of, stop_length
from nemo_war.generation.embedded.turn import Turn
from nemo_war.metadata import TurnMetadata

WORDS = ["<calc>", "1", "+", "2", "</", "calc", ">", " and", " more"]


def decode(tokens: list[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


@pytest.mark.parametrize(
    ("stop", "length"), [("</calc>", 7), ("1", 2), ("+2", 4), ("absent", 9), ("<calc>1+2</calc> and more", 9)]
)
def test_output_ends_with_the_token_that_completes_the_stop_string(stop: str, length: int) -> None:
    assert stop_length(list(range(9)), stop, decode) == length


def test_tokens_and_logprobs_behind_a_stop_string_are_cut_together() -> None:
    completion = SimpleNamespace(
        token_ids=list(range(9)),
        logprobs=[{token: SimpleNamespace(logprob=-float(token))} for token in range(9)],
        stop_reason="</calc>",
        finish_reason="stop",
    )
    answer = answer_of(SimpleNamespace(outputs=[completion], num_cached_tokens=5), 0.1, (2, 3), decode)
    assert answer.tokens == tuple(range(7))
    assert answer.logprobs == tuple(-float(token) for token in range(7))
    assert (answer.cached_tokens, answer.epochs, answer.finish_reason) == (5, (2, 3), "stop")


def test_the_salt_is_the_policy_epoch() -> None:
    turn = Turn((1, 2), TurnMetadata("t", "g", epoch=4), 8)
    assert prompt_of(turn, salted=True)["cache_salt"] == "epoch-4"
    assert "cache_salt" not in prompt_of(turn, salted=False)
