"""Two real replicas tell each other: over Ray, through the workers' files in memory, into the drafts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from nemo_war.config import SpeculativeConfig, WarConfig
from nemo_war.generation.embedded.fleet import Fleet
from tests.engine.fleets import RawReplica, copy_prompt, fleet, sample, statistics

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

WAR = WarConfig(speculative=SpeculativeConfig(max_draft_tokens=8))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(model_folder: Path) -> AsyncIterator[Fleet]:
    async with fleet(model_folder, war=WAR, replicas=2, replica_class=RawReplica) as made:
        yield made


async def test_what_one_replica_generated_the_other_knows_after_the_step(
    two: Fleet, model_folder: Path
) -> None:
    await sample(two, 0, copy_prompt(model_folder), 32, 4)
    before = await statistics(two, 1)
    done = await two.exchange.end_step()
    assert done is not None
    assert (done.failed, done.dropped) == (0, 0)
    here, there = await statistics(two, 0), await statistics(two, 1)
    assert before["history_tokens"] == 0
    assert 0 < there["history_tokens"] <= here["history_tokens"], "equal pages are stored once there"
    assert await two.exchange.end_step() is None


async def test_a_replica_that_does_not_answer_costs_the_exchange_only(
    two: Fleet, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sample(two, 0, copy_prompt(model_folder, seed=1), 16, 2)
    with monkeypatch.context() as patched:
        patched.setattr(two._actors, "_up", {0})
        done = await two.exchange.end_step()
    assert done is not None
    assert done.failed == done.batches == 1
    again = await two.exchange.end_step()
    assert again is not None
    assert again.failed == 0
