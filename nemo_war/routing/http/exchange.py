"""One attempt: a request sent to one replica, its answer sent on to the client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from nemo_war.routing.http.answer import Answer
from nemo_war.routing.http.headers import of_answer, of_request
from nemo_war.routing.http.identity import read_epoch
from nemo_war.routing.http.metrics import Metrics
from nemo_war.routing.http.profiles import as_error, broken_stream, status_for
from nemo_war.routing.http.queue import Reservation
from nemo_war.routing.http.replicas import FAILURES, Replica, Replicas, explain, is_refusal
from nemo_war.routing.http.settings import RouterSettings
from nemo_war.routing.http.stream import EventStream

EVENTS = "text/event-stream"


class AttemptFailedError(Exception):
    """The replica did not serve the request, of which the client has seen nothing.

    Attributes:
        response: what it answered instead, if it did.
        reached: whether the request may have got there.
    """

    def __init__(self, message: str, response: web.Response | None = None, reached: bool = True) -> None:
        super().__init__(message)
        self.response, self.reached = response, reached


class _OversizedError(Exception):
    """The answer is larger than any may be; it may have no end."""


class Exchange:
    """Sends requests to replicas."""

    def __init__(
        self, session: aiohttp.ClientSession, replicas: Replicas, settings: RouterSettings, metrics: Metrics
    ) -> None:
        self._session, self._replicas = session, replicas
        self._profile, self._max_mib = settings.profile, settings.max_answer_mib
        self._metrics = metrics

    async def send(self, request: web.Request, content: bytes, place: Reservation) -> web.StreamResponse:
        """Send a request to its place, and read the answer into that.

        Returns:
            The response; a stream has been sent already.

        Raises:
            AttemptFailedError: it may be tried elsewhere.
            ClientGoneError: the client closed its connection.
        """
        stream: EventStream | None = None
        replica, answer = place.replica, place.answer
        target, headers = replica.target(request.path_qs), of_request(request.headers, place.turn)
        try:
            async with (
                replica.attempt(),
                self._session.request(
                    request.method, target, headers=headers, data=content, allow_redirects=False
                ) as upstream,
            ):
                self._replicas.epoch = max(self._replicas.epoch, read_epoch(upstream.headers))
                if upstream.content_type == EVENTS:
                    stream = EventStream(request, upstream.status, of_answer(upstream.headers))
                    await self._pipe(upstream, stream, replica, answer)
                    return stream.response
                body = b"".join([chunk async for chunk in self._chunks(upstream)])
                return self._whole(upstream, body, replica, answer)
        except FAILURES as error:
            self._replicas.failed(replica, error)
            replica.suspected.set()
            reached = not is_refusal(error)
            failure = AttemptFailedError(
                f"replica {replica.number} was lost: {explain(error)}", reached=reached
            )
        except _OversizedError:  # the request's fault, for all that is known
            failure = AttemptFailedError(f"replica {replica.number} answered more than {self._max_mib} MiB")
        if stream is None or not stream.started:
            raise failure
        if answer.complete:  # all but the end of the connection has arrived
            await stream.close()
        else:
            self._metrics.broken_streams.inc()
            await stream.abort(broken_stream(str(failure)))
        return stream.response

    async def _pipe(
        self, upstream: aiohttp.ClientResponse, stream: EventStream, replica: Replica, answer: Answer
    ) -> None:
        async for chunk in self._chunks(upstream):
            lines = stream.lines(chunk)
            answer.feed(lines)  # first, as the client may go on as soon as it has them
            if answer.error >= 500:  # so vLLM ends its streams, all with status 200, when its engine dies
                replica.suspected.set()
                if not stream.started:
                    raise AttemptFailedError(f"replica {replica.number} answered {answer.error}")
            await stream.send(lines)
        answer.end()
        await stream.close()
        if answer.error >= 500:
            self._metrics.broken_streams.inc()

    async def _chunks(self, upstream: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in upstream.content.iter_any():
            size += len(chunk)
            if size > self._max_mib << 20:
                raise _OversizedError
            yield chunk

    def _whole(
        self, upstream: aiohttp.ClientResponse, body: bytes, replica: Replica, answer: Answer
    ) -> web.Response:
        status, headers = status_for(self._profile, upstream.status), of_answer(upstream.headers)
        if status != upstream.status:
            body = as_error(status, body)
            headers["Content-Type"] = "application/json"
        response = web.Response(status=status, body=body, headers=headers)
        if upstream.status >= 500:
            # The request may be at fault, or the replica: its /health is to tell.
            replica.suspected.set()
            raise AttemptFailedError(f"replica {replica.number} answered {upstream.status}", response)
        if upstream.status == 200:
            answer.read(body)
        return response
