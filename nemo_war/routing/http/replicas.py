"""The replicas behind the router: who is healthy, and what is under way at each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import aiohttp
from yarl import URL

from nemo_war.routing.facts import ReplicaFacts
from nemo_war.routing.http.capacity import kv_tokens
from nemo_war.routing.http.health import Health
from nemo_war.routing.http.settings import RouterSettings, base

_JITTER = 0.2
"""Part by which the time between two looks varies, so that many routers do not look at once."""
_METRICS_BYTES = 1 << 23
"""Of a replica's metrics; more are not read."""
_LEAST = 0.1
"""Part of that time that passes in any case, however many requests fail."""

FAILURES = (aiohttp.ClientError, OSError, TimeoutError)
"""What a request to a replica raises when it fails."""


class Replica:
    """One replica.

    Attributes:
        number: its place among all.
        url: where it is, without a slash at the end.
        health: whether it is given work.
        kv_tokens: what its KV cache holds; 0 while that is unknown.
        suspected: set when a request failed there, to have a look at once.
    """

    def __init__(self, number: int, url: str, kv_tokens: int) -> None:
        self.number = number
        self.url = base(url)
        self.health = Health()
        self.kv_tokens = kv_tokens
        self.suspected = asyncio.Event()
        self._attempts: set[asyncio.Timeout] = set()

    def target(self, path: str) -> URL:
        """A path, with its query, at this replica."""
        return URL(self.url + path, encoded=True)

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[None]:
        """A request under way here; when the replica is lost it ends in a TimeoutError.

        So it does where the replica was lost between the request's placement and now: nobody would end it.
        """
        lost = None if self.health.healthy else 0.0
        async with asyncio.timeout(lost) as bound:
            self._attempts.add(bound)
            try:
                yield
            finally:
                self._attempts.discard(bound)

    def abort(self) -> None:
        """End all that is under way here."""
        attempts, self._attempts = self._attempts, set()
        for bound in attempts:
            bound.reschedule(asyncio.get_running_loop().time())


class Replicas:
    """All replicas, watched.

    Attributes:
        all: the replicas, by their number.
        epoch: the latest policy epoch that any answered under; 0 where they do not say.
    """

    def __init__(
        self,
        settings: RouterSettings,
        on_lost: Callable[[int], None],
        on_returned: Callable[[int], None],
        say: Callable[[str], None],
    ) -> None:
        """Know where they are, and of none whether it is there.

        Args:
            settings: of the router.
            on_lost: told once each time one is lost, before what is under way there is ended.
            on_returned: told each time one comes or comes back.
            say: takes a line for the operator.
        """
        self.all = [Replica(number, url, settings.kv_tokens) for number, url in enumerate(settings.replicas)]
        step_time = settings.step_time()
        self._facts = [ReplicaFacts(each.number, False, settings.kv_tokens, step_time) for each in self.all]
        self._settings = settings
        self._on_lost, self._on_returned, self._say = on_lost, on_returned, say
        self.epoch = self._turn = 0
        self._allowed = frozenset(range(len(self.all)))

    def facts(self) -> list[ReplicaFacts]:
        """What a scheduler is told of them."""
        for each in self.all:  # one whose facts are as before keeps the record: policies know it by that
            known, serves = self._facts[each.number], self.serves(each)
            if (known.healthy, known.kv_tokens) != (serves, each.kv_tokens):
                self._facts[each.number] = replace(known, healthy=serves, kv_tokens=each.kv_tokens)
        return self._facts

    def allow(self, numbers: Collection[int]) -> None:
        """Only these are given work from now on, as far as they are healthy; before, all were."""
        self._allowed = frozenset(numbers)

    def serves(self, replica: Replica) -> bool:
        """Whether it is given work."""
        return replica.health.healthy and replica.number in self._allowed

    def healthy(self) -> set[int]:
        """Numbers of those that are given work."""
        return {each.number for each in self.all if self.serves(each)}

    def next(self, avoid: frozenset[int]) -> Replica | None:
        """The next healthy one in turn, for what is no turn of a trajectory."""
        candidates = [each for each in self.all if self.serves(each) and each.number not in avoid]
        self._turn += 1
        return candidates[self._turn % len(candidates)] if candidates else None

    def failed(self, replica: Replica, error: BaseException) -> None:
        """A request or a look at it failed."""
        if replica.health.failed(refused=is_refusal(error)):
            self._say(f"replica {replica.number} ({replica.url}) is lost: {explain(error)}")
            self._on_lost(replica.number)
            replica.abort()

    async def look(self, session: aiohttp.ClientSession, replica: Replica) -> None:
        """Ask one for its health."""
        bound = aiohttp.ClientTimeout(total=self._settings.health_timeout_s)
        try:
            async with session.get(replica.target("/health"), timeout=bound) as answer:
                answer.raise_for_status()
        except FAILURES as error:
            self.failed(replica, error)
        else:
            if not replica.health.healthy and not self._settings.kv_tokens:
                replica.kv_tokens = await self._capacity(session, replica)
            if replica.health.answered():
                holds = f", its KV cache holds {replica.kv_tokens:,} tokens" if replica.kv_tokens else ""
                self._say(f"replica {replica.number} ({replica.url}) is healthy{holds}")
                self._on_returned(replica.number)

    async def _capacity(self, session: aiohttp.ClientSession, replica: Replica) -> int:
        """What its KV cache holds, before it is given work; 0 where it does not say."""
        bound = aiohttp.ClientTimeout(total=self._settings.health_timeout_s)
        try:
            async with session.get(replica.target("/metrics"), timeout=bound) as answer:
                answer.raise_for_status()
                text = await answer.content.readexactly(_METRICS_BYTES)
        except asyncio.IncompleteReadError as whole:
            text = whole.partial
        except FAILURES:
            return 0
        return kv_tokens(text.decode(errors="replace"))

    async def watch(self, session: aiohttp.ClientSession, replica: Replica) -> None:
        """Look at one for ever: regularly, and at once when a request failed there."""
        while True:
            pause = self._settings.health_interval_s * random.uniform(1 - _JITTER, 1 + _JITTER)
            with suppress(TimeoutError):  # `wait_for` of Python 3.11 would swallow the end of the watch
                async with asyncio.timeout(pause):
                    await replica.suspected.wait()
            replica.suspected.clear()
            await self.look(session, replica)
            await asyncio.sleep(_LEAST * self._settings.health_interval_s)


def is_refusal(error: BaseException) -> bool:
    """Whether the replica takes no connections, whatever the reason: it is not there."""
    return isinstance(error, aiohttp.ClientConnectorError)


def explain(error: BaseException) -> str:
    """An error in one line."""
    return (str(error) or type(error).__name__).splitlines()[0]
