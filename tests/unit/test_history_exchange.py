"""The shell of the exchange with replicas that are plain objects: what fails or hangs costs sharing only."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from virtual_time import VirtualTimePolicy, now

from nemo_war.config import ExchangeConfig
from nemo_war.generation.embedded.rollout import Rollouts, Start
from nemo_war.generation.embedded.script import TurnLimits, Verdict
from nemo_war.generation.embedded.turn import Answer, Turn
from nemo_war.generation.history_exchange import Exchanged, HistoryExchange
from nemo_war.metadata import TurnMetadata
from nemo_war.routing.round_robin import RoundRobin
from nemo_war.speculative.archive import decode, encode
from nemo_war.speculative.history import SuffixHistory
from nemo_war.telemetry.records import ExchangeRecord, Pass


@pytest.fixture
def event_loop_policy() -> VirtualTimePolicy:
    """A kernel that is compiled meanwhile must not use up a deadline."""
    return VirtualTimePolicy()


TEXT = np.random.default_rng(0).integers(0, 500, 300).astype(np.int32)


class FakeReplica:
    """A history behind the two methods that matter, and whatever should go wrong with them."""

    def __init__(self) -> None:
        self.history = SuffixHistory(8192, 4)
        self.calls: list[str] = []
        self.broken: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()

    async def export_history(self, lengths: dict[str, int]) -> np.ndarray | None:
        await self._enter("export_history")
        sequences = self.history.export_sequences(lengths).cut(lengths)
        return np.frombuffer(encode(sequences), np.uint8) if sequences.trajectories else None

    async def import_history(self, blob: Any) -> int:
        await self._enter("import_history")
        return self.history.import_sequences(decode(blob.tobytes(), "of a test"))

    async def _enter(self, method: str) -> None:
        self.calls.append(method)
        await self.gate.wait()
        if method in self.broken:
            raise RuntimeError(f"{method} failed")

    def remember(self, name: str, tokens: int) -> None:
        self.history.end(self.history.begin(name, "g", 0, TEXT[:tokens]))

    def knows(self) -> dict[str, int]:
        return {each.trajectory: len(each.tokens) for each in self.history.export_sequences().rows()}


class Place:
    """Three fake replicas and the exchange between them; `shared` holds what went into the object store."""

    def __init__(self, **settings: Any) -> None:
        self.replicas = [FakeReplica() for _ in range(3)]
        self.shared: list[Any] = []
        self.exchange = HistoryExchange(
            ExchangeConfig(**{"when": "step", "timeout_s": 0.2, "interval_s": 0.01} | settings),
            range(3),
            self.ask,
            self.share,
            now,
        )

    async def ask(self, number: int, method: str, *arguments: Any) -> Any:
        return await getattr(self.replicas[number], method)(*arguments)

    def share(self, blob: Any) -> Any:
        self.shared.append(blob)
        return blob

    def turn(self, name: str, replica: int, tokens: int, *, learn: bool = True) -> None:
        metadata = TurnMetadata(name, "g", learn=learn)
        self.exchange.placed(metadata, replica)
        self.replicas[replica].remember(name, tokens)
        self.exchange.finished(metadata, replica, tokens)

    def known(self) -> list[dict[str, int]]:
        return [each.knows() for each in self.replicas]


async def test_at_the_end_of_a_step_all_know_everything_and_each_batch_is_shared_once():
    place = Place()
    place.turn("a", 0, 100)
    place.turn("b", 1, 50)
    done = await place.exchange.end_step()
    assert (done.batches, done.tokens, done.failed, done.dropped) == (2, 150, 0, 0)
    assert len(place.shared) == 2
    assert place.known() == [{"a": 100, "b": 50}, {"b": 50, "a": 100}, {"a": 100, "b": 50}]
    assert await place.exchange.end_step() is None


async def test_what_is_left_out_is_reported_once():
    place = Place(max_tokens_per_batch=1024)
    place.turn("a", 0, 100)
    place.exchange.finished(TurnMetadata("long", "g"), 0, 1025)
    assert (await place.exchange.end_step()).dropped == 1
    place.turn("b", 0, 100)
    assert (await place.exchange.end_step()).dropped == 0


async def test_validation_is_not_told():
    place = Place()
    place.turn("v", 0, 100, learn=False)
    assert await place.exchange.end_step() is None


async def test_switched_off_nothing_is_told():
    place = Place(when="off")
    place.turn("a", 0, 100)
    place.exchange.ended("a", 100)
    assert await place.exchange.end_step() is None
    assert await place.exchange.seed(1) is None


@pytest.mark.parametrize(("method", "told"), [("export_history", []), ("import_history", [2])])
async def test_a_call_that_fails_is_counted_logged_once_and_made_up_for_by_the_next_exchange(
    method: str, told: list[int], caplog: pytest.LogCaptureFixture
):
    place = Place()
    failing = place.replicas[0 if method == "export_history" else 1]
    failing.broken = {method}
    place.turn("a", 0, 100)
    place.turn("b", 0, 70)
    done = await place.exchange.end_step()
    assert (done.batches, done.failed) == (1, 1)
    assert [number for number in (1, 2) if place.known()[number]] == told
    await place.exchange.end_step()
    assert len(caplog.records) == 1
    assert f"{method} failed" in caplog.text
    failing.broken = set()
    assert (await place.exchange.end_step()).failed == 0
    assert place.known() == [{"a": 100, "b": 70}] * 3


async def test_a_replica_that_hangs_costs_the_time_limit_and_keeps_nobody_else_from_learning():
    place = Place()
    place.replicas[1].gate.clear()
    place.turn("a", 0, 100)
    place.turn("b", 2, 70)
    async with asyncio.timeout(2):
        done = await place.exchange.end_step()
    assert done.failed == 2
    assert done.seconds == pytest.approx(0.2, abs=0.15)
    assert place.known()[0].keys() == place.known()[2].keys() == {"a", "b"}
    place.replicas[1].gate.set()
    await place.exchange.end_step()
    assert place.known()[1] == {"a": 100, "b": 70}


async def test_what_was_forgotten_where_it_ran_is_not_asked_for_again_and_again():
    place = Place()
    place.turn("a", 0, 100)
    place.replicas[0].history.clear()
    assert (await place.exchange.end_step()).failed == 0
    assert await place.exchange.end_step() is None
    assert place.shared == []


async def test_live_a_finished_turn_reaches_its_siblings_while_the_step_runs():
    place = Place(when="live")
    reports: list[Exchanged] = []
    async with place.exchange.step(lambda when, done: reports.append(done)):
        place.exchange.placed(TurnMetadata("sibling", "g"), 1)
        place.turn("a", 0, 100)
        while not reports:
            await asyncio.sleep(0.01)
    assert place.known() == [{"a": 100}, {"a": 100}, {}]
    assert [(each.batches, each.tokens) for each in reports] == [(1, 100)]
    await place.exchange.end_step()
    assert place.known()[2] == {"a": 100}


async def test_a_live_exchange_that_the_end_of_the_step_cuts_off_is_made_up_for_then():
    place = Place(when="live", timeout_s=30.0)
    place.replicas[1].gate.clear()
    async with place.exchange.step(lambda when, done: None):
        place.exchange.placed(TurnMetadata("sibling", "g"), 1)
        place.turn("a", 0, 100)
        while not place.replicas[1].calls:
            await asyncio.sleep(0.01)
    place.replicas[1].gate.set()
    assert (await place.exchange.end_step()).failed == 0
    assert place.known() == [{"a": 100}] * 3


async def test_a_step_that_fails_ends_the_live_exchange_with_its_own_error():
    place = Place(when="live")

    async def step() -> None:
        async with place.exchange.step(lambda when, done: None):
            await asyncio.sleep(0.02)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await step()
    assert len(asyncio.all_tasks()) == 1


async def test_a_replica_that_came_back_empty_is_seeded_from_its_peers():
    place = Place()
    place.turn("a", 0, 100)
    place.turn("b", 2, 70)
    await place.exchange.end_step()
    place.exchange.lost(2)
    place.replicas[2] = FakeReplica()
    done = await place.exchange.seed(2)
    assert (done.tokens, done.failed) == (170, 0)
    assert place.known()[2] == {"a": 100, "b": 70}


async def test_after_histories_were_emptied_what_was_known_is_not_taken_for_known():
    place = Place()
    place.turn("a", 0, 100)
    await place.exchange.end_step()
    place.exchange.cleared(range(3))
    place.turn("a", 0, 100)
    assert (await place.exchange.end_step()).tokens == 100


class FakeDispatcher:
    """Of a fleet that places turns by itself."""

    def begin_step(self, trajectories: int) -> None:
        """It does not matter."""

    def end(self, trajectory: str) -> None:
        """Nothing is held for it."""


class FakeFleet:
    """Serves each turn on the next replica."""

    epoch = 0

    def __init__(self, place: Place) -> None:
        self.place, self.exchange = place, place.exchange
        self.turns = 0
        self.told_before_commit: list[str] = []

    def dispatcher(self, policy: Any) -> FakeDispatcher:
        return FakeDispatcher()

    async def generate(self, turn: Turn, dispatcher: FakeDispatcher) -> tuple[int, Answer]:
        replica, name = self.turns % 3, turn.metadata.trajectory
        self.turns += 1
        self.exchange.placed(turn.metadata, replica)
        await asyncio.sleep(0.02)
        if name == "broken":
            raise RuntimeError("the engine said no")
        self.place.replicas[replica].remember(name, len(turn.prompt) + 10)
        self.exchange.finished(turn.metadata, replica, len(turn.prompt) + 10)
        return replica, Answer((1,) * 10, (0.0,) * 10, "stop", 0, 0.01, (0, 0))

    async def commit(self, lengths: dict[int, dict[str, int]]) -> None:
        self.told_before_commit = [call for each in self.place.replicas for call in each.calls]


class TwoTurns:
    """A script of two turns with an observation between them."""

    def __init__(self) -> None:
        self.prompt = list(range(20))
        self.turns = 0

    def limits(self, context: int) -> TurnLimits:
        return TurnLimits(10)

    def judge(self, tokens: list[int]) -> Verdict:
        self.turns += 1
        return Verdict(1.0, [7, 8, 9] if self.turns == 1 else None)


async def roll_out(fleet: FakeFleet, phase: str) -> list[ExchangeRecord]:
    records: list[Any] = []
    rollouts = Rollouts(fleet, fleet.dispatcher(RoundRobin()), records.append, lambda: 0.0)
    starts = [Start(name, "g", TwoTurns()) for name in ("a", "b", "broken")]
    await rollouts.run(Pass("war", phase), 0, starts, lambda: None)
    return [each for each in records if isinstance(each, ExchangeRecord)]


async def test_rollouts_end_with_an_exchange_of_final_text_that_is_on_record():
    fleet = FakeFleet(Place())
    (record,) = await roll_out(fleet, "live")
    assert (record.when, record.step, record.tokens, record.failed) == ("step", 0, 2 * 43, 0)
    assert fleet.place.known()[0] == {"a": 43, "b": 43}
    assert fleet.place.known()[1].items() == fleet.place.known()[2].items()
    assert fleet.told_before_commit == [], "what was told was not final yet"


async def test_validation_rollouts_exchange_nothing():
    assert await roll_out(FakeFleet(Place()), "validation") == []


async def test_live_exchanges_are_on_record_beside_the_one_at_the_end():
    fleet = FakeFleet(Place(when="live", interval_s=0.005))
    records = await roll_out(fleet, "live")
    assert records[0].when == "live"
    assert "import_history" in fleet.told_before_commit
    assert [each.keys() for each in fleet.place.known()] == [{"a", "b"}] * 3
