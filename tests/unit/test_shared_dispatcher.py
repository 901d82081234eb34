"""A scheduler that many share, and that may die, hang, be late or be wrong: turns go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial, wraps
from random import Random
from typing import Any

import pytest
from fake_link import FakeLink
from virtual_time import VirtualTime, now, run

from nemo_war.config import PolicyName
from nemo_war.generation.scheduling.dispatcher import SharedDispatcher
from nemo_war.generation.scheduling.heartbeat import Patience
from nemo_war.generation.scheduling.link import UnreachableError
from nemo_war.generation.scheduling.scheduler import OtherLifeError, SharedScheduler
from nemo_war.metadata import TurnMetadata
from nemo_war.routing import policies
from nemo_war.routing.facts import Books, Outcome, Placement, ReplicaFacts, TurnFacts, Waiting
from nemo_war.routing.least_outstanding import LeastOutstanding
from nemo_war.routing.policy import Policy, in_flight
from nemo_war.routing.sticky import Sticky

PATIENCE = Patience()
NOTICED_S = PATIENCE.beat_s + PATIENCE.deadline_s + 0.1


def turn(name: str, number: int = 0) -> TurnFacts:
    return TurnFacts(TurnMetadata(name, name[0], number), prompt_tokens=10, max_new_tokens=5)


class Job:
    """Processes that place turns by one scheduler.

    Attributes:
        open: whether they want anything placed.
        healthy: of each replica.
    """

    def __init__(self, policy: Callable[[], Policy] = LeastOutstanding, clients: int = 1, seed: int = 0):
        self.open = True
        self.healthy = [True, True]
        self.link = FakeLink(policy, now, seed)
        self.clients = [SharedDispatcher(self.link, self.replicas, now) for _ in range(clients)]
        self.on = self.clients[0]

    def replicas(self) -> Sequence[ReplicaFacts] | None:
        return [ReplicaFacts(n, each, 2000) for n, each in enumerate(self.healthy)] if self.open else None

    def start(self, *names: str) -> list[asyncio.Task[Placement]]:
        return [asyncio.create_task(self.on.place(turn(name))) for name in names]

    def changed(self) -> None:
        for client in self.clients:
            client.pump()

    async def warm(self) -> None:
        """The scheduler has answered once."""
        self.on.finish((await self.on.place(turn("warm"))).ticket, Outcome(1, 0))
        self.on.end("warm")
        await asyncio.sleep(0.1)

    @property
    def scheduler(self) -> SharedScheduler:
        assert self.link.scheduler is not None
        return self.link.scheduler

    async def check_rest(self) -> None:
        """Nothing runs and nothing waits, so that nothing is held, here or there, and nobody asks."""
        await asyncio.sleep(PATIENCE.beat_s + 5 * self.link.delay_s + 1)
        assert not any(client.out for client in self.clients)
        assert (self.scheduler.scheduler.running, self.scheduler.scheduler.waiting) == (0, 0)
        assert self.scheduler.check_integrity()
        assert not any(of.turns for of in self.scheduler._clients.values())
        assert not any(books.trajectories for books in self.scheduler.scheduler.books.values())
        for client in self.clients:
            assert client._here.scheduler.running == client._here.scheduler.waiting == 0
            assert sum(client.running_on(number) for number in range(len(self.healthy))) == 0
            assert not client._waiting
            assert not client._placed
            assert not client._outbox
            assert not client._heartbeat.asks


class Windows(LeastOutstanding):
    """Lets no more than sixteen turns run on a replica, and the others wait for as long as it takes."""

    def choose(
        self, turn: Waiting, candidates: Sequence[ReplicaFacts], books: Books, now: float
    ) -> int | None:
        room = [facts for facts in candidates if in_flight(books, facts.replica) < 16]
        return super().choose(turn, room, books, now) if room else None


def scenario(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in virtual time."""

    @wraps(test)
    def wrapped(**parameters: Any) -> None:
        run(test(**parameters))

    return wrapped


@scenario
async def test_the_scheduler_places_and_hears_how_it_ended() -> None:
    job = Job()
    first, second = [await task for task in job.start("a", "b")]
    assert {first.replica, second.replica} == {0, 1}
    assert [job.on.running_on(n) for n in (0, 1)] == [1, 1]
    await asyncio.sleep(0.1)
    assert (await job.scheduler.statistics())["replicas"] == {0: 1, 1: 1}
    job.on.finish(first.ticket, Outcome(3, 0))
    job.on.finish(second.ticket, None)
    with pytest.raises(ValueError, match="not running"):
        job.on.finish(second.ticket, None)
    job.on.end("a")
    job.on.end("b")
    await job.check_rest()
    assert job.on.take_outages().fallbacks == 0
    assert job.link.asked["finish"] == 2


@scenario
async def test_a_hold_of_ten_minutes_is_not_taken_for_a_hang() -> None:
    job = Job(Windows)
    tasks = job.start(*(f"t{n}" for n in range(40)))
    await asyncio.sleep(600)
    placed = [task.result() for task in tasks if task.done()]
    assert len(placed) == 32, "two windows of 16"
    job.on.finish(placed[0].ticket, Outcome(1, 0))
    await asyncio.sleep(0.1)
    assert sum(task.done() for task in tasks) == 33
    assert job.on.take_outages().outages == 0


@scenario
async def test_when_it_dies_turns_are_placed_here_at_once_and_go_back_once_it_is_there() -> None:
    job = Job(Windows)
    await job.warm()
    tasks = job.start(*(f"t{n}" for n in range(40)))
    await asyncio.sleep(1)
    dead = job.scheduler
    job.link.kill()
    await asyncio.sleep(0.01)
    assert all(task.done() for task in tasks)
    assert job.on.out
    before = now()
    tasks += job.start("new")
    await tasks[-1]
    assert now() == before
    for task in tasks:
        job.on.finish(task.result().ticket, Outcome(1, 0))
        job.on.end(task.result().trajectory)
    await asyncio.sleep(5)
    outages = job.on.take_outages()
    assert (outages.fallbacks, outages.outages) == (9, 1), outages
    assert outages.reason == "UnreachableError: it died"
    assert job.link.restart_s <= outages.seconds_out <= job.link.restart_s + PATIENCE.beat_s + 0.1
    (back,) = job.start("back")
    job.on.finish((await back).ticket, Outcome(1, 0))
    job.on.end("back")
    assert job.on.take_outages().fallbacks == 0
    assert job.scheduler is not dead
    assert "back" in job.scheduler.scheduler._home
    await job.check_rest()


@scenario
async def test_a_hang_is_noticed_within_three_seconds_and_what_it_says_later_is_released() -> None:
    job = Job(Windows)
    await job.warm()
    job.link.freeze()
    tasks = job.start(*(f"t{n}" for n in range(8)))
    await asyncio.sleep(NOTICED_S)
    assert all(task.done() for task in tasks)
    outages = job.on.take_outages()
    assert (outages.fallbacks, outages.outages) == (8, 1)
    assert outages.reason == "UnreachableError: it did not answer within 2 s"
    job.link.thaw()
    await asyncio.sleep(0.5)  # it places them now, for nothing
    for task in tasks:
        job.on.finish((await task).ticket, Outcome(1, 0))
    for n in range(8):
        job.on.end(f"t{n}")
    await asyncio.sleep(3)
    assert len(job.link.lives) == 1, "it is as it was, and keeps what it knows"
    await job.check_rest()


@scenario
async def test_when_it_hangs_for_long_it_is_started_again() -> None:
    job = Job()
    await job.warm()
    job.link.freeze()
    (task,) = job.start("a")
    job.on.finish((await task).ticket, None)
    await asyncio.sleep(PATIENCE.restart_s + 10)
    assert (job.link.restarts, len(job.link.lives)) == (1, 2)
    assert not job.on.out
    assert job.scheduler._replicas == job.replicas(), "the new one was told of the replicas"


@scenario
async def test_one_that_has_forgotten_us_but_answers_is_told_everything_again_at_once() -> None:
    job = Job()
    await job.warm()
    await asyncio.sleep(5)
    job.scheduler._clients.clear()
    tasks = job.start("a")
    await asyncio.sleep(0.001)  # asked for the new life; this one goes to the old one
    tasks += job.start("b")
    await asyncio.sleep(0.1)
    assert all(task.done() for task in tasks)
    outages = job.on.take_outages()
    assert (outages.fallbacks, outages.outages) == (0, 0)
    for task in tasks:
        job.on.finish(task.result().ticket, None)
        job.on.end(task.result().trajectory)
    await job.check_rest()


@scenario
async def test_a_turn_of_an_earlier_life_is_not_finished_in_a_later_one() -> None:
    job = Job()
    (first,) = job.start("first")
    await first
    job.link.kill()
    await asyncio.sleep(5)
    (second,) = job.start("second")
    await second
    assert not job.on.out
    job.on.finish(first.result().ticket, Outcome(1, 0))
    await asyncio.sleep(5)
    assert job.link.asked["finish"] == 0
    assert job.scheduler.scheduler.running == 1
    job.on.finish(second.result().ticket, Outcome(1, 0))
    job.on.end("second")
    await job.check_rest()


@scenario
async def test_it_is_started_again_with_growing_patience_as_starting_may_be_what_takes_so_long() -> None:
    job = Job()
    await job.warm()
    job.link.restart_s = 1e9
    job.link.kill()
    (task,) = job.start("a")
    job.on.finish((await task).ticket, None)
    await asyncio.sleep(500)
    assert job.link.restarts == 4, "after 30, 90, 210 and 450 s"


@scenario
async def test_a_slow_start_is_waited_for() -> None:
    job = Job()
    job.link.freeze()
    tasks = job.start("a", "b")
    job.on.begin_step(2)
    await asyncio.sleep(40)
    assert not any(task.done() for task in tasks)
    job.link.thaw()
    await asyncio.gather(*tasks)
    assert job.on.take_outages().outages == 0
    assert job.link.asked["begin_step"] == 1


class Stumbling(LeastOutstanding):
    """Has a bug."""

    def placed(self, turn: Waiting, replica: int, now: float) -> None:
        if turn.turn.metadata.trajectory == "odd":
            raise KeyError("odd")

    def choose(self, turn: Waiting, candidates: Sequence[ReplicaFacts], books: Books, now: float) -> int:
        if turn.turn.metadata.trajectory == "poison":
            raise KeyError("poison")
        return super().choose(turn, candidates, books, now)


@pytest.mark.parametrize("name", ["poison", "odd"])
@scenario
async def test_a_policy_that_raises_counts_as_no_answer_for_that_turn_only(name: str) -> None:
    job = Job(Stumbling)
    tasks = job.start("a", name)
    placed = [await task for task in tasks]
    tasks = job.start("b")
    placed += [await task for task in tasks]
    outages = job.on.take_outages()
    assert (outages.outages, outages.reason) == (0, f"KeyError: '{name}'")
    assert outages.fallbacks in (1, 2), "which of those that waited together it stumbles over cannot be told"
    for each in placed:
        job.on.finish(each.ticket, Outcome(1, 0))
        job.on.end(each.trajectory)
    await job.check_rest()


@pytest.mark.parametrize("what", ["refit", "loss"])
@scenario
async def test_what_was_decided_just_before_a_refit_or_a_loss_is_not_taken(what: str) -> None:
    job = Job()
    await job.warm()
    (task,) = job.start("a")
    await asyncio.sleep(0.0021)  # decided, and on its way
    assert job.scheduler.scheduler.running == 1
    (chosen,) = [n for n in (0, 1) if job.scheduler.scheduler.running_on(n)]
    if what == "refit":
        job.open = False
        job.changed()
    else:
        job.healthy[chosen] = False
        job.on.lost(chosen)
    await asyncio.sleep(20 if what == "refit" else 0.1)
    if what == "refit":
        assert not task.done()
        assert sum(map(job.on.running_on, (0, 1))) == 0
        job.open = True
        job.changed()
        await task
    else:
        assert task.result().replica == 1 - chosen
    job.on.finish(task.result().ticket, Outcome(1, 0))
    job.on.end("a")
    await job.check_rest()
    assert job.on.take_outages().fallbacks == 0


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.0021, 0.5])
@pytest.mark.parametrize("held", [False, True])
@scenario
async def test_a_cancelled_turn_leaves_nothing_behind(after_s: float, held: bool) -> None:
    job = Job()
    await job.warm()
    job.open = not held
    job.changed()
    (task,) = job.start("a")
    await asyncio.sleep(after_s)
    if task.done():
        job.on.finish(task.result().ticket, None)
    else:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    job.open = True
    job.changed()
    job.on.end("a")
    await job.check_rest()


@pytest.mark.parametrize("state", ["waiting", "away", "given back"])
@scenario
async def test_a_failure_reaches_whoever_waits_wherever_and_all_who_come(state: str) -> None:
    job = Job()
    await job.warm()
    if state == "given back":
        (task,) = job.start("a")
        await asyncio.sleep(0.0021)
        job.open = False
        await asyncio.sleep(0.004)  # between giving it back and asking again
        assert not job.on._waiting
    else:
        job.open = False
        job.changed()
        if state == "away":
            job.link.kill()
            await asyncio.sleep(0.1)
        (task,) = job.start("a")
        await asyncio.sleep(1)
    assert not task.done()
    job.on.fail(RuntimeError("refit failed"))
    for failing in (task, *job.start("b")):
        with pytest.raises(RuntimeError, match="refit failed"):
            await failing
    await job.on.stop()


@scenario
async def test_a_refit_during_an_outage_holds_turns_here_too() -> None:
    job = Job()
    await job.warm()
    job.link.restart_s = 60
    job.link.kill()
    await asyncio.sleep(0.1)
    job.open = False
    tasks = job.start("a", "b")
    await asyncio.sleep(10)
    assert not any(task.done() for task in tasks)
    job.open = True
    job.changed()
    await asyncio.gather(*tasks)
    assert job.on.take_outages().fallbacks == 2


@scenario
async def test_what_got_lost_on_the_way_is_sent_again() -> None:
    job = Job()
    await job.warm()
    for method in ("set_replicas", "place", "finish", "end"):
        job.link.lost = 1.0 if method == "place" else 0.0
        (task,) = job.start(method)
        await asyncio.sleep(0.01)
        job.link.lost = 0.0
        await asyncio.wait_for(task, 3)
        job.link.lost = 1.0 if method in ("set_replicas", "finish", "end") else 0.0
        job.healthy[1] = method != "set_replicas"
        job.changed()
        job.on.finish(task.result().ticket, Outcome(1, 0))
        job.on.end(method)
        await asyncio.sleep(0.01)
        job.link.lost = 0.0
        await job.check_rest()
        assert job.scheduler._replicas == job.replicas()


@scenario
async def test_a_process_that_is_busy_with_something_else_does_not_take_that_for_a_hang() -> None:
    job = Job(Windows)
    tasks = job.start(*(f"t{n}" for n in range(40)))
    await asyncio.sleep(1)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTime)
    job.link.delay_s = 0.3
    for step in range(20):
        await asyncio.sleep(0.15 * step)
        loop.jump(30)  # a training step
    await asyncio.sleep(5)
    assert job.on.take_outages().outages == 0
    assert sum(task.done() for task in tasks) == 32


@scenario
async def test_turns_of_a_client_that_died_are_not_held_for_ever() -> None:
    job = Job(Windows, clients=2)
    first = [asyncio.create_task(job.clients[0].place(turn(f"t{n}"))) for n in range(40)]
    await asyncio.sleep(1)
    (waiting,) = [asyncio.create_task(job.clients[1].place(turn("other")))]
    await asyncio.sleep(30)
    assert not waiting.done()
    await job.clients[0].stop()
    for task in first:
        task.cancel()
    await asyncio.sleep(70)
    assert waiting.done()
    assert job.scheduler.scheduler.running == 1
    assert len(job.scheduler._clients) == 1


@scenario
async def test_one_that_was_silent_for_too_long_loses_its_turns_there_and_nothing_else() -> None:
    job = Job(Windows, clients=2)
    tasks = job.start(*(f"t{n}" for n in range(40)))
    await asyncio.sleep(1)
    other = asyncio.create_task(job.clients[1].place(turn("other")))
    job.scheduler._clients[job.on._name].seen -= 100
    job.scheduler._forget_the_silent()
    await asyncio.sleep(3)
    assert other.done()
    assert all(task.done() for task in tasks)
    for task in tasks:
        job.on.finish(task.result().ticket, Outcome(1, 0))
        job.on.end(task.result().trajectory)
    job.clients[1].finish(other.result().ticket, Outcome(1, 0))
    job.clients[1].end("other")
    await job.check_rest()


@scenario
async def test_nothing_is_placed_while_one_client_wants_that_and_nothing_where_one_knows_of_a_loss() -> None:
    scheduler = Job().scheduler
    a, b = [(await scheduler.ping(name, 0)).life for name in "ab"]
    up, down = [ReplicaFacts(0), ReplicaFacts(1)], [ReplicaFacts(0), ReplicaFacts(1, healthy=False)]
    await scheduler.set_replicas(a, "a", 0, None)
    await scheduler.set_replicas(b, "b", 0, up)
    assert scheduler._replicas is None
    await scheduler.set_replicas(a, "a", 1, down)
    assert scheduler._replicas == down
    await scheduler.set_replicas(b, "b", 1, up)
    assert scheduler._replicas == down
    await scheduler.set_replicas(a, "a", 2, up)
    assert scheduler._replicas == up


@scenario
async def test_what_is_told_counts_once_and_in_order_however_it_arrives() -> None:
    scheduler = Job().scheduler
    life = (await scheduler.ping("a", 0)).life
    up = [ReplicaFacts(0)]
    await scheduler.end(life, "a", 2, "t")  # overtook two others
    await scheduler.finish(life, "a", 1, 0, None)
    placing = asyncio.create_task(scheduler.place(life, "a", 0, turn("t")))
    await asyncio.sleep(0)
    assert (await scheduler.ping("a", 0)).next == 0
    await scheduler.set_replicas(life, "a", 0, up)
    assert (await scheduler.ping("a", 0)).next == 3
    await placing
    await scheduler.set_replicas(life, "a", 0, None)
    assert scheduler._replicas == up
    assert scheduler.scheduler.running == scheduler.scheduler.waiting == 0
    assert not scheduler.scheduler._home
    assert scheduler.check_integrity()


@scenario
async def test_calls_for_another_life_and_of_turns_that_are_over_are_refused() -> None:
    scheduler = Job().scheduler
    life = (await scheduler.ping("a", 3)).life
    for call in (
        scheduler.place("earlier", "a", 5, turn("t")),
        scheduler.finish("earlier", "a", 0, 5, None),
        scheduler.end("earlier", "a", 0, "t"),
        scheduler.begin_step("earlier", "a", 0, 1),
        scheduler.lost("earlier", "a", 0, 0),
        scheduler.set_replicas("earlier", "a", 0, None),
        scheduler.finish(life, "nobody", 0, 5, None),
    ):
        with pytest.raises(OtherLifeError):
            await call
    await scheduler.finish(life, "a", 0, 7, None)  # overtook its `place`
    for number in (2, 7):
        assert await scheduler.place(life, "a", number, turn("t")) is None
    await scheduler.ping("a", 8)
    assert not scheduler._clients["a"].over


@scenario
async def test_a_turn_that_is_asked_for_twice_is_placed_once() -> None:
    scheduler = Job().scheduler
    life = (await scheduler.ping("a", 0)).life
    await scheduler.set_replicas(life, "a", 0, [ReplicaFacts(0)])
    first = await scheduler.place(life, "a", 0, turn("t"))
    assert await scheduler.place(life, "a", 0, turn("t")) == first
    assert scheduler.scheduler.running == 1
    for word in (1, 1, 2):
        await scheduler.finish(life, "a", word, 0, None)
    assert scheduler.scheduler.running == 0
    assert scheduler.check_integrity()


@scenario
async def test_without_any_scheduler_ever_turns_go_on() -> None:
    class Nowhere:
        async def refuse(self) -> None:
            raise UnreachableError("there is no Ray")

        def call(self, method: str, *arguments: Any) -> Coroutine[Any, Any, None]:
            return self.refuse()

        async def restart(self) -> None:
            raise RuntimeError("there is no Ray")

        async def stop(self) -> None:
            pass

    on = SharedDispatcher(Nowhere(), lambda: [ReplicaFacts(0), ReplicaFacts(1)], now)
    for number in range(200):
        placement = await on.place(turn(f"t{number % 8}"))
        await asyncio.sleep(1)
        on.finish(placement.ticket, Outcome(1, 0))
    outages = on.take_outages()
    assert (outages.fallbacks, outages.outages) == (200, 1)
    assert outages.seconds_out >= 199
    assert outages.reason == "UnreachableError: there is no Ray"
    await on.stop()


class Chaos:
    """Trajectories on several clients, while whatever may happen to a scheduler happens."""

    def __init__(self, policy: PolicyName, seed: int) -> None:
        self.random = Random(seed)
        self.job = Job(partial(policies.make, policy), clients=2, seed=seed)
        self.job.healthy = [True] * 3
        self.running: set[tuple[int, int]] = set()
        self.done = self.cancelled = 0

    async def trajectory(self, client: int, name: str) -> None:
        on, random = self.job.clients[client], self.random
        for number in range(6):
            placing = asyncio.create_task(on.place(turn(name, number)))
            if random.random() < 0.1:
                await asyncio.wait({placing}, timeout=random.choice((0, 0.001, 0.01, 1, 5)))
                placing.cancel()
            try:
                placement = await placing
            except asyncio.CancelledError:
                self.cancelled += 1
                continue
            assert self.job.open, "nothing is placed during a refit"
            assert self.job.healthy[placement.replica], "nor on what is down"
            assert placement.trajectory == name
            key = (client, placement.ticket)
            assert key not in self.running
            self.running.add(key)
            assert on.running_on(placement.replica) >= 1
            await asyncio.sleep(random.choice((0, 0.01, 1, 10)))
            self.running.remove(key)
            on.finish(placement.ticket, random.choice((None, Outcome(3, 0), Outcome(9, 5))))
            self.done += 1
            await asyncio.sleep(random.choice((0, 0, 0.5, 5)))
        on.end(name)

    async def faults(self) -> None:
        job, random = self.job, self.random
        while True:
            await asyncio.sleep(random.expovariate(1 / 3))
            match random.choice(("kill", "freeze", "freeze", "slow", "lossy", "replica", "refit", "calm")):
                case "kill":
                    job.link.restart_s = random.choice((0, 0.5, 5, 50))
                    job.link.kill()
                case "freeze":
                    job.link.freeze()
                    asyncio.get_running_loop().call_later(random.choice((0.5, 1.5, 3, 10)), job.link.thaw)
                case "slow":
                    job.link.delay_s = random.choice((0.1, 1, 4))
                case "lossy":
                    job.link.lost = random.choice((0.05, 0.3))
                case "replica":
                    number = random.randrange(3)
                    job.healthy[number] = not job.healthy[number]
                    for client in job.clients:
                        client.pump() if job.healthy[number] else client.lost(number)
                case "refit":
                    job.open = not job.open
                    job.changed()
                case "calm":
                    self.calm()

    def calm(self) -> None:
        job = self.job
        job.link.thaw()
        job.link.delay_s, job.link.lost = 0.002, 0.0
        job.healthy, job.open = [True] * 3, True
        job.changed()

    async def run(self) -> None:
        breaking = asyncio.create_task(self.faults())
        trajectories = [
            asyncio.create_task(self.trajectory(client, f"{'ab'[number % 2]}{client}{number}"))
            for client in range(2)
            for number in range(12)
        ]
        everything = asyncio.gather(*trajectories)
        await asyncio.wait({everything}, timeout=self.random.choice((10, 30, 100)))
        breaking.cancel()
        self.calm()
        self.job.link.restart_s = 1
        await asyncio.wait_for(everything, 400)
        assert self.done + self.cancelled == 24 * 6
        await self.after()

    async def after(self) -> None:
        """It heals by itself, and then places all there is."""
        job = self.job
        await asyncio.sleep(60)
        await job.check_rest()
        for client in job.clients:
            client.take_outages()
            placements = [await client.place(turn(f"late{number}")) for number in range(3)]
            await asyncio.sleep(0.1)
            assert client.take_outages().fallbacks == 0
            assert job.scheduler.scheduler.running == 3
            for placement in placements:
                client.finish(placement.ticket, Outcome(1, 0))
                client.end(placement.trajectory)
            await job.check_rest()


@pytest.mark.parametrize("policy", ["war", "published", "sticky"])
@pytest.mark.parametrize("seed", range(15))
def test_whatever_happens_every_turn_is_placed_once_and_nothing_stays_behind(
    policy: PolicyName, seed: int
) -> None:
    async def one() -> None:
        await Chaos(policy, seed).run()

    run(one())


def test_sticky_is_a_policy_that_can_be_shared() -> None:
    async def one() -> None:
        job = Job(Sticky)
        first = [await task for task in job.start("a", "b", "c", "d")]
        for each in first:
            job.on.finish(each.ticket, Outcome(1, 0))
        again = [await task for task in job.start("a", "b", "c", "d")]
        assert [each.replica for each in again] == [each.replica for each in first]

    run(one())
