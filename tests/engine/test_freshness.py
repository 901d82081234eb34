"""After a refit nothing of the old policy is served: logprobs are those of a fresh engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from nemo_war.config import SpeculativeConfig, WarConfig
from nemo_war.generation.embedded.fleet import Fleet
from nemo_war.generation.embedded.replica import Replica
from nemo_war.generation.embedded.weights import Weights, share_weights
from nemo_war.generation.refit import RefitError
from tests.engine.fleets import Pinned, chat, fleet, sample, turn
from tests.engine.policies import as_bytes, as_folder, perturbed

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

EQUAL = 2e-3
"""Nats between two float32 engines on equal weights: batches of other sizes sum in another order."""
DIFFERENT = 0.05

WAR = WarConfig(speculative=SpeculativeConfig(max_draft_tokens=4))
NO_SPECULATION = WarConfig(speculative=SpeculativeConfig(enabled=False))


class LyingReplica(Replica):
    """Says that it reset its caches, and did not."""

    async def reset_caches(self) -> bool:
        return True


class RefusingReplica(Replica):
    """Does what stock vLLM does with requests in flight: refuses, and says so."""

    async def reset_caches(self) -> bool:
        return False


class UnsaltedReplica(LyingReplica):
    """Neither resets nor salts: the defect that freshness by construction closes."""

    async def generate(self, turn):  # type: ignore[no-untyped-def]
        from dataclasses import replace

        return await super().generate(replace(turn, metadata=replace(turn.metadata, epoch=0)))


@pytest.fixture(scope="module")
def prompt(model_folder: Path) -> list[int]:
    """Long enough for several KV blocks; what does not fill a block is never cached."""
    text = "\n".join(f"line {number} = {number * number}" for number in range(40))
    return chat(model_folder).prompt([{"role": "user", "content": f"Sum up this file:\n{text}"}])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def truth(
    model_folder: Path, prompt: list[int], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict]:
    """What fresh engines on the old and on the new weights say, and the new weights."""
    new = perturbed(model_folder, 0.08)
    folder = as_folder(model_folder, new, tmp_path_factory.mktemp("policy") / "new")
    said = {}
    for name, where in (("old", model_folder), ("new", folder)):
        async with fleet(where, dtype="float32") as fresh:
            said[name] = await first_token_logprobs(fresh, prompt)
    yield said | {"weights": share_weights(as_bytes(new))}
    assert distance(said["old"], said["new"]) > DIFFERENT, "the perturbation is too small to see staleness"


async def test_logprobs_after_a_refit_in_flight_are_those_of_a_fresh_engine(
    model_folder, prompt, truth
) -> None:
    async with fleet(model_folder, war=WAR, in_flight="pause", dtype="float32") as war:
        assert distance(await first_token_logprobs(war, prompt), truth["old"]) < EQUAL
        answers = await refit_in_flight(war, prompt, truth["weights"])
        assert all(len(answer.tokens) == 96 and answer.epochs == (0, 1) for answer in answers)
        after = await first_token_logprobs(war, prompt)
    print(f"|to new| {distance(after, truth['new']):.1e}, |to old| {distance(after, truth['old']):.2f} nats")
    assert distance(after, truth["new"]) < EQUAL
    assert distance(after, truth["old"]) > DIFFERENT


async def test_the_salt_holds_when_the_reset_silently_fails(model_folder, prompt, truth) -> None:
    async with fleet(
        model_folder, war=NO_SPECULATION, in_flight="pause", dtype="float32", replica_class=LyingReplica
    ) as war:
        await first_token_logprobs(war, prompt)
        await refit_in_flight(war, prompt, truth["weights"])
        after = await first_token_logprobs(war, prompt)
    assert distance(after, truth["new"]) < EQUAL


async def test_without_salt_and_reset_stale_kv_is_served(model_folder, prompt, truth) -> None:
    async with fleet(
        model_folder, war=NO_SPECULATION, in_flight="pause", dtype="float32", replica_class=UnsaltedReplica
    ) as war:
        await first_token_logprobs(war, prompt)
        await refit_in_flight(war, prompt, truth["weights"])
        after = await first_token_logprobs(war, prompt)
    assert distance(after, truth["new"]) > DIFFERENT, "these tests cannot see stale KV"


async def test_a_replica_that_refuses_the_reset_fails_the_refit(model_folder, truth) -> None:
    async with fleet(model_folder, war=NO_SPECULATION, replica_class=RefusingReplica) as war:
        with pytest.raises(RefitError, match="replica 0 did not reset its prefix cache"):
            await war.refit(truth["weights"])
        with pytest.raises(RefitError):
            await war.generate(turn([1, 2, 3], 4), war.dispatcher(Pinned()))
        assert war.epoch == 0


async def refit_in_flight(war: Fleet, prompt: list[int], weights: Weights) -> list:
    """Refit while four long turns run."""
    running = [asyncio.ensure_future(sample(war, 0, prompt, 96, 1)) for _ in range(4)]
    await asyncio.sleep(1.0)
    outcome = await war.refit(weights)
    assert outcome.kv_reset_ok
    assert outcome.in_flight == 4
    return [answers[0] for answers in await asyncio.gather(*running)]


async def first_token_logprobs(on: Fleet, prompt: list[int], replica: int = 0) -> dict[int, float]:
    """Logprob of each token that some sample began with; the whole prompt's KV bears on it."""
    answers = await sample(on, replica, prompt, 1, 48)
    return {answer.tokens[0]: answer.logprobs[0] for answer in answers}


def distance(a: dict[int, float], b: dict[int, float]) -> float:
    """Largest difference over the tokens both have seen, in nats."""
    common = a.keys() & b.keys()
    return max(abs(a[token] - b[token]) for token in common) if common else float(np.inf)
