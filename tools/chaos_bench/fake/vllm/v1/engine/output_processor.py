"""What the engine says, as outputs for the clients; runs in their event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizer import Tokenizer
from vllm.v1.core.sched.scheduler import EngineCoreOutput
from vllm.v1.request import Request


class RequestOutputCollector:
    """The last output of a request, or what it failed with, for the one who waits for it."""

    def __init__(self, request: Request, external_id: str, tokenizer: Tokenizer) -> None:
        self.request_id, self.external_id = request.request_id, external_id
        self._prompt, self._params = request.tokens[: request.num_prompt_tokens], request.params
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._text, self._sum = "", 0.0
        self._cached_tokens: int | None = None
        self._output: RequestOutput | Exception | None = None
        self._ready = asyncio.Event()

    async def get(self) -> RequestOutput:
        """Wait for an output that was not returned yet; of cumulative ones the last is enough."""
        await self._ready.wait()
        output, self._output = self._output, None
        self._ready.clear()
        assert output is not None
        if isinstance(output, Exception):
            raise output
        return output

    def fail(self, error: Exception) -> None:
        """There will be no more."""
        self._put(error)

    def update(self, new: EngineCoreOutput) -> str | None:
        """Take in new tokens; why the request is over, if it is.

        A stop string cuts the text. Tokens of the same step behind it stay, as in vLLM.
        """
        reason = new.finish_reason
        stop_reason: int | str | None = new.stop_reason
        if self._cached_tokens is None and new.new_token_ids:
            self._cached_tokens = new.num_cached_tokens
        stop = self._append(new)
        if stop is not None:
            reason, stop_reason = "stop", stop
        if self._params.output_kind is not RequestOutputKind.FINAL_ONLY or reason:
            self._put(self._request_output(reason, stop_reason))
        return reason

    def _append(self, new: EngineCoreOutput) -> str | None:
        """Add tokens, and return the stop string that they complete."""
        before, ended = len(self._text), new.finish_reason == "stop"
        for place, (token, value) in enumerate(zip(new.new_token_ids, new.new_logprobs, strict=True), 1):
            text = self._tokenizer.decode((token,))
            self._tokens.append(token)
            self._logprobs.append({token: Logprob(value, 1, text)})
            self._sum += value
            if not (ended and place == len(new.new_token_ids)):  # a stop token is no part of the text
                self._text += text
            if len(self._tokens) <= self._params.min_tokens:
                before = len(self._text)
        if len(self._tokens) <= self._params.min_tokens:
            return None
        for stop in self._params.stop or ():
            # It may have begun in text that was there before, and ends in what is new.
            place = self._text.find(stop, max(0, before - len(stop) + 1))
            if place >= 0:
                self._text = self._text[:place]
                return stop
        return None

    def _request_output(self, reason: str | None, stop_reason: int | str | None) -> RequestOutput:
        completion = CompletionOutput(
            index=0,
            text=self._text,
            token_ids=self._tokens,
            cumulative_logprob=self._sum,
            logprobs=None if self._params.logprobs is None else self._logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
        )
        return RequestOutput(
            self.external_id, None, self._prompt, None, [completion], reason is not None, self._cached_tokens
        )

    def _put(self, output: RequestOutput | Exception) -> None:
        if not isinstance(self._output, Exception):
            self._output = output
            self._ready.set()


class OutputProcessor:
    """All requests that someone waits for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._collectors: dict[str, RequestOutputCollector] = {}

    def add_request(self, request: Request, external_id: str) -> RequestOutputCollector:
        """Where its outputs will be."""
        collector = RequestOutputCollector(request, external_id, self._tokenizer)
        self._collectors[request.request_id] = collector
        return collector

    def process_outputs(self, outputs: Iterable[EngineCoreOutput]) -> list[str]:
        """Hand out what a step brought; requests that ended here and not in the engine are returned."""
        over_here = []
        for new in outputs:
            collector = self._collectors.get(new.request_id)
            if collector is not None and collector.update(new):  # others were aborted in the meantime
                del self._collectors[new.request_id]
                if new.finish_reason is None:
                    over_here.append(new.request_id)
        return over_here

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        """End requests, by the client's name of them or by the engine's; return the engine's names."""
        wanted = set(request_ids)
        ended = [
            name
            for name, collector in self._collectors.items()
            if (name if internal else collector.external_id) in wanted
        ]
        for name in ended:
            self._collectors.pop(name).update(EngineCoreOutput(name, finish_reason="abort"))
        return ended

    def propagate_error(self, error: Exception) -> None:
        """Nobody gets anything more."""
        collectors, self._collectors = self._collectors, {}
        for collector in collectors.values():
            collector.fail(error)
