"""The router: who asks, where to, and what if that fails.

A turn waits for its placement, is sent there, and when the replica does not serve it and
the client has seen nothing yet, it waits again, for another one. A request that is no
turn of a trajectory goes to the next healthy replica.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, cast

import aiohttp
from aiohttp import web

from nemo_war.config import PolicyName
from nemo_war.metadata import TurnMetadata
from nemo_war.routing.facts import TurnFacts
from nemo_war.routing.http.answer import Answer
from nemo_war.routing.http.exchange import AttemptFailedError, Exchange
from nemo_war.routing.http.identity import announced
from nemo_war.routing.http.lengths import Course
from nemo_war.routing.http.metrics import Metrics
from nemo_war.routing.http.profiles import RefusalError, invalid, no_replica
from nemo_war.routing.http.prompt import Prompt, read_prompt, variant
from nemo_war.routing.http.queue import NOWHERE, Queue, Reservation
from nemo_war.routing.http.replicas import Replicas
from nemo_war.routing.http.settings import RouterSettings
from nemo_war.routing.http.trajectories import Trajectories
from nemo_war.routing.options import Options
from nemo_war.routing.policies import make
from nemo_war.routing.policy import Policy, in_flight, trajectories

_KEEP_ALIVE_S = 3.0
"""Below the 5 s of vLLM's server: it must not close a connection at the moment a request is sent on it."""
_COMPLETION_TOKENS = 16
"""What `/v1/completions` generates where no limit is named, as OpenAI defines it."""
_MOST_NEW_TOKENS = 1 << 24
"""More than any model generates; what a client names beyond it costs no more than this."""

Place = Callable[[frozenset[int]], AbstractAsyncContextManager[Reservation]]
"""Reserves a place anywhere but at the replicas given."""


class Router:
    """All that requests share. One event loop drives it, inside of `running`.

    Attributes:
        settings: as given.
        metrics: what happened so far.
        replicas: where requests go.
        queue: turns that wait.
        trajectories: whose turns they are.
    """

    def __init__(
        self,
        settings: RouterSettings,
        say: Callable[[str], None],
        learned: Callable[[TurnMetadata, int, int], None] = lambda turn, replica, tokens: None,
    ) -> None:
        """Set everything up.

        Args:
            settings: how it behaves.
            say: takes a line for the operator.
            learned: told of each answer whose turn it was, which replica gave it, and how many tokens of the
                trajectory that replica knows now.
        """
        self.settings = settings
        self._learned = learned
        self.metrics = Metrics()
        self.replicas = Replicas(settings, self._lost, self._returned, say)
        self.queue = Queue(_policy(settings), self.replicas, settings, time.monotonic)
        self.trajectories = Trajectories(settings.idle_s, settings.max_trajectories, self.queue.end)
        self._exchange: Exchange
        self._add_figures()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Connections are there and replicas are watched."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self.settings.connect_timeout_s, sock_read=self.settings.read_timeout_s
        )
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
            auto_decompress=False,
            timeout=timeout,
        ) as session:
            self._exchange = Exchange(session, self.replicas, self.settings, self.metrics)
            await asyncio.gather(*(self.replicas.look(session, each) for each in self.replicas.all))
            tasks = [asyncio.create_task(self.replicas.watch(session, each)) for each in self.replicas.all]
            tasks.append(asyncio.create_task(self._sweep()))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def turn(self, request: web.Request) -> web.StreamResponse:
        """Serve a turn of a trajectory."""
        body = await self._body(request)
        facts, prompt, course, named = self._begin(request, _object(body))
        name = facts.metadata.trajectory
        try:
            answered = partial(self._answered, name, prompt, course, named)
            place = partial(self.queue.placed, facts, answered)
            return await self._deliver(request, body, place)
        finally:
            self.trajectories.finish(name, time.monotonic())

    async def plain(self, request: web.Request) -> web.StreamResponse:
        """Serve what any replica can."""
        return await self._deliver(request, await self._body(request), self._anywhere)

    def state(self) -> dict[str, Any]:
        """Everything at a glance."""
        books = self.queue.scheduler.books
        return {
            "replicas": [
                {
                    "replica": each.number,
                    "url": each.url,
                    "healthy": each.health.healthy,
                    "kv_tokens": each.kv_tokens,
                    "in_flight": in_flight(books, each.number),
                    "trajectories": trajectories(books, each.number),
                }
                for each in self.replicas.all
            ],
            "waiting": self.queue.scheduler.waiting,
            "running": self.queue.scheduler.running,
            "trajectories": len(self.trajectories),
            "active_trajectories": self.trajectories.active,
            "policy_epoch": self.replicas.epoch,
            "counters": self.metrics.counters(),
        }

    def _begin(
        self, request: web.Request, fields: Mapping[str, Any]
    ) -> tuple[TurnFacts, Prompt, Course, bool]:
        """Find out whose turn it is; also whether the request said so."""
        try:
            said = announced(request.headers, fields)
        except ValueError as error:
            raise invalid(str(error)) from None
        prompt = read_prompt(fields)
        begun = self.trajectories.begin(prompt, said.trajectory, said.group)
        metadata = said.metadata or TurnMetadata(
            begun.trajectory, begun.group, begun.turn, self.replicas.epoch
        )
        limit = _limit(fields, self.settings.new_tokens if prompt.conversation else _COMPLETION_TOKENS)
        course, length = begun.course, self.trajectories.lengths.tokens(prompt, begun.course)
        beginning = prompt.beginning(length, course.stride)
        facts = TurnFacts(metadata, length, limit, beginning, variant(fields, prompt), prompt.tokens is None)
        return facts, prompt, course, said.trajectory is not None

    async def _deliver(self, request: web.Request, body: bytes, place: Place) -> web.StreamResponse:
        """Try one replica after the other, none twice; if none serves, take what one answered instead."""
        avoid, attempts = NOWHERE, 0
        answered: web.Response | None = None
        refusal = RefusalError(502, "replica_lost", "")
        while attempts < self.settings.max_attempts:
            asked = time.monotonic()
            try:
                async with place(avoid) as reservation:
                    replica = reservation.replica
                    self.metrics.wait_seconds.observe(time.monotonic() - asked)
                    self.metrics.attempts.labels(replica.number).inc()
                    response = await self._exchange.send(request, body, reservation)
                    self._take_note(reservation)
                    return response
            except AttemptFailedError as error:
                self.metrics.failures.labels(replica.number).inc()
                avoid |= {replica.number}
                attempts += error.reached  # one that never saw the request was not harmed by it
                answered = error.response or answered
                refusal = RefusalError(502, "replica_lost", f"{error}; failed on {len(avoid)} replicas")
            except RefusalError as error:
                refusal = error
                break
        if answered is None:
            raise refusal
        return answered

    def _take_note(self, place: Reservation) -> None:
        """Tell of what a replica knows by its answer."""
        outcome = place.answer.outcome()
        if place.turn is not None and outcome is not None:
            self._learned(
                place.turn, place.replica.number, place.answer.prompt_tokens + outcome.output_tokens
            )

    @asynccontextmanager
    async def _anywhere(self, avoid: frozenset[int]) -> AsyncIterator[Reservation]:
        replica = self.replicas.next(avoid)
        if replica is None:
            raise no_replica("no replica is healthy, or this request failed on all that are")
        yield Reservation(replica)

    async def _body(self, request: web.Request) -> bytes:
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise invalid(f"the body is larger than {self.settings.max_body_mib} MiB", 413) from None
        except web.RequestPayloadError as error:
            raise invalid(f"the body is not complete: {error}") from None

    async def _sweep(self) -> None:
        """Do what only time brings about."""
        while True:
            await asyncio.sleep(self.settings.health_interval_s)
            self.trajectories.expire(time.monotonic())
            self.queue.give_up()

    def _lost(self, replica: int) -> None:
        self.metrics.losses.labels(replica).inc()
        self.queue.lost(replica)

    def _returned(self, replica: int) -> None:
        self.queue.returned()

    def _answered(self, name: str, prompt: Prompt, course: Course, named: bool, answer: Answer) -> None:
        """Take note of a complete answer, of which the client has not seen the end yet."""
        outcome = answer.outcome()
        if outcome is not None:
            self.metrics.prompt_tokens.inc(answer.prompt_tokens)
            self.metrics.cached_tokens.inc(outcome.cached_tokens or 0)
            self.metrics.output_tokens.inc(outcome.output_tokens)
        self.trajectories.lengths.learn(prompt, course, answer.prompt_tokens)
        if not named:
            self.trajectories.stands(name, prompt.after(answer))

    def _add_figures(self) -> None:
        scheduler, every = self.queue.scheduler, self.replicas.all
        metrics, count = self.metrics, len(every)
        metrics.watch("waiting", "Turns that wait for a replica.", lambda: scheduler.waiting)
        metrics.watch_replicas("healthy", "1 if given work.", count, lambda n: every[n].health.healthy)
        metrics.watch_replicas("in_flight", "Turns placed there.", count, partial(in_flight, scheduler.books))
        metrics.watch_replicas(
            "trajectories", "Trajectories there.", count, partial(trajectories, scheduler.books)
        )


def _policy(settings: RouterSettings) -> Policy:
    name = cast(PolicyName, settings.policy)  # the settings have checked it
    return make(name, settings.seed, Options(patience_s=settings.patience_s))


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise invalid("the body is not JSON") from None
    if not isinstance(fields, dict):
        raise invalid("the body is not a JSON object")
    return fields


def _limit(fields: Mapping[str, Any], default: int) -> int:
    """Most tokens the turn may generate."""
    for name in ("max_completion_tokens", "max_tokens"):
        if type(fields.get(name)) is int and fields[name] > 0:
            return min(int(fields[name]), _MOST_NEW_TOKENS)
    return default
