"""Which policy each token of an answer is of, and whether it may be.

A turn that the caller asked for in the fleet's epoch B and had answered in epoch E says that its replica
was in epoch b when it began there, and in e when it ended. B ≤ b, or a policy was served after it had been
replaced; b = e, unless turns are frozen during a refit. Its tokens are of the policies from b to e, in this
order, and of none after E, which nobody may have before the fleet has.

With a fake engine each token's logprob tells what it was computed on, and the token itself who sampled it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tools.chaos_bench.model import Context, logprob, next_token
from tools.chaos_bench.witness import Answered


@dataclass(frozen=True, slots=True)
class FakeModel:
    """What has to be known of the fake engines to judge what they say.

    Attributes:
        digests: of the weights, by epoch.
        vocabulary: tokens lie below.
        end: the end-of-sequence token.
        longest: tokens of a sequence, at most.
    """

    digests: Mapping[int, str]
    vocabulary: int
    end: int
    longest: int


def misdated(answered: Answered, frozen: bool) -> str:
    """What is wrong with the epochs that an answer is stamped with; empty where nothing is.

    Args:
        answered: the turn.
        frozen: whether turns are frozen during a refit, so that they may end under another policy.
    """
    began, ended = answered.answer.epochs
    # One that ends as its replica is frozen may be stamped with the epoch that the fleet is about to enter.
    last = answered.ended + frozen
    if answered.began <= began <= ended <= last and (frozen or began == ended):
        return ""
    return (
        f"{answered.name} was asked for in epoch {answered.began}, and answered in epoch {answered.ended} "
        f"with tokens of epochs {began} to {ended}"
    )


def stale(answered: Answered, model: FakeModel) -> str:
    """Which token was not computed on the weights that it should have been; empty where all were."""
    answer = answered.answer
    if len(answer.logprobs) != len(answer.tokens):
        return f"{answered.name} has {len(answer.logprobs)} logprobs for {len(answer.tokens)} tokens"
    origins = _origins(answered, model)
    if len(origins) == len(answer.tokens):
        return ""
    began, ended = answer.epochs
    return (
        f"{answered.name}, epochs {began} to {ended}: the logprob of token {len(origins)} of "
        f"{len(answer.tokens)} is of none of these policies, given what is before it"
    )


def foreign(answered: Answered, model: FakeModel) -> str:
    """Which token the replica did not sample in answer to this prompt; empty where it did all of them.

    An answer with tokens of two attempts at its turn has some that the other replica sampled.
    """
    turn, answer = answered.turn, answered.answer
    name = f"{answered.replica}/{turn.metadata.trajectory}/{turn.metadata.turn}"
    context = Context(turn.prompt)
    for place, (token, digest) in enumerate(zip(answer.tokens, _origins(answered, model), strict=False)):
        banned = {model.end} if place < turn.min_new_tokens else ()
        if token != next_token(digest, name, context, model.vocabulary, model.end, banned):
            return f"{answered.name}: token {place} of {len(answer.tokens)} was not sampled for it there"
        context.extend((token,))
    whole = {
        "length": min(turn.max_new_tokens, model.longest - len(turn.prompt)) == len(answer.tokens),
        "stop": answer.tokens[-1:] == (model.end,)
        and (turn.ignore_eos or model.end not in answer.tokens[:-1]),
    }
    if not whole.get(answer.finish_reason, False):
        return f"{answered.name} ended after {len(answer.tokens)} tokens with {answer.finish_reason!r}"
    return ""


def _origins(answered: Answered, model: FakeModel) -> list[str]:
    """Digests of the weights that the tokens were computed on, up to the first that is not explained."""
    began, ended = answered.answer.epochs
    allowed = [model.digests[epoch] for epoch in range(began, min(ended, answered.ended) + 1)]
    context, at, origins = Context(answered.turn.prompt), 0, []
    for token, said in zip(answered.answer.tokens, answered.answer.logprobs, strict=False):
        while at < len(allowed) and logprob(allowed[at], frozenset({allowed[at]}), context, token) != said:
            at += 1
        if at == len(allowed):
            break
        origins.append(allowed[at])
        context.extend((token,))
    return origins
