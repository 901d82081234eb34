"""One attempt: a request sent to one replica, its answer sent on to the client."""

from __future__ import annotations

import aiohttp
from aiohttp import web

from nemo_war.routing.http.answer import Answer
from nemo_war.routing.http.headers import of_answer, of_request
from nemo_war.routing.http.metrics import Metrics
from nemo_war.routing.http.profiles import as_error, broken_stream, status_for
from nemo_war.routing.http.replicas import FAILURES, Replica, Replicas, explain, is_refusal
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


class Exchange:
    """Sends requests to replicas."""

    def __init__(
        self, session: aiohttp.ClientSession, replicas: Replicas, profile: str, metrics: Metrics
    ) -> None:
        self._session, self._replicas = session, replicas
        self._profile, self._metrics = profile, metrics

    async def send(
        self, request: web.Request, body: bytes, replica: Replica, answer: Answer
    ) -> web.StreamResponse:
        """Send a request and read the answer into `answer`.

        Returns:
            The response; a stream has been sent already.

        Raises:
            AttemptFailedError: it may be tried elsewhere.
            ClientGoneError: the client closed its connection.
        """
        stream: EventStream | None = None
        target, headers = replica.target(request.path_qs), of_request(request.headers)
        try:
            async with (
                replica.attempt(),
                self._session.request(
                    request.method, target, headers=headers, data=body, allow_redirects=False
                ) as upstream,
            ):
                if upstream.content_type == EVENTS:
                    stream = EventStream(request, upstream.status, of_answer(upstream.headers))
                    await self._pipe(upstream, stream, replica, answer)
                    return stream.response
                return self._whole(upstream, await upstream.read(), replica, answer)
        except FAILURES as error:
            self._replicas.failed(replica, error)
            replica.suspected.set()
            message = f"replica {replica.number} was lost: {explain(error)}"
            if stream is None or not stream.started:
                raise AttemptFailedError(message, reached=not is_refusal(error)) from error
        if answer.complete:  # all but the end of the connection has arrived
            await stream.close()
        else:
            self._metrics.broken_streams.inc()
            await stream.abort(broken_stream(message))
        return stream.response

    async def _pipe(
        self, upstream: aiohttp.ClientResponse, stream: EventStream, replica: Replica, answer: Answer
    ) -> None:
        async for chunk in upstream.content.iter_any():
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
