"""A mock replica over HTTP: `python -m nemo_war.simulation.server --port 8001 --number 1`.

It answers what vLLM's and SGLang's servers answer, as far as routers and benchmark clients
ask, at the pace of a simulated engine. Text is tokens: each word that is a number is that
token. A response is such text too, made from the prompt alone; a client that appends it to
the messages, or to the prompt, extends the prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from nemo_war.config import StepTimePrior
from nemo_war.errors import UserError
from nemo_war.generation.step_time import StepTimeModel
from nemo_war.simulation.hashing import chain, invent
from nemo_war.simulation.replica import Finished, Replica, ReplicaConfig, Request

MODEL = "mock"
_OUTPUT_TOKENS = 16  # where a request does not say how many, as in vLLM
_TOKENS = 2**31  # token ids are int32


@dataclass(slots=True, eq=False)
class _Turn:
    """A request being served.

    Attributes:
        prompt, output: int32 tokens.
        news: set when `generated` grew; a waiting handler clears it.
        generated: output tokens that the client may see.
        finished: None until the last one is there.
    """

    name: str
    prompt: np.ndarray
    output: np.ndarray
    streaming: bool
    news: asyncio.Event = field(default_factory=asyncio.Event)
    generated: int = 0
    finished: Finished | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in the cache; known once it is finished."""
        assert self.finished is not None
        return self.finished.cached_tokens

    @property
    def usage(self) -> dict[str, Any]:
        """What OpenAI's API calls usage."""
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(self.output),
            "total_tokens": len(self.prompt) + len(self.output),
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Engine:
    """Steps a replica at scaled real time.

    Attributes:
        replica: the replica; its clock is in model seconds.
    """

    def __init__(self, config: ReplicaConfig, speed: float) -> None:
        """Start idle.

        Args:
            config: of the replica.
            speed: model seconds in a second.
        """
        self.replica = Replica(config)
        self._speed = speed
        self._turns: dict[str, _Turn] = {}
        self._arrival = asyncio.Event()
        self._names = itertools.count()

    def begin(self, prompt: np.ndarray, outputs: int, streaming: bool) -> _Turn:
        """Submit a request; what it generates depends on its prompt alone.

        Args:
            prompt: int32[n].
            outputs: tokens to generate.
            streaming: whether each token is news, or the last one only.

        Raises:
            ValueError: the replica can never serve it.
        """
        config = self.replica.config
        longest = config.kv_blocks * config.block_size
        if not 0 < len(prompt) < len(prompt) + outputs <= longest:
            raise ValueError(f"{len(prompt)} prompt and {outputs} output tokens; both, and {longest} at most")
        output = invent(int(chain(prompt, len(prompt))[0]), np.arange(outputs))
        turn = _Turn(f"{MODEL}-{next(self._names)}", prompt, output, streaming)
        blocks = chain(np.concatenate([prompt, output]), config.block_size)
        self.replica.submit(Request(turn.name, len(prompt), outputs, blocks))
        self._turns[turn.name] = turn
        self._arrival.set()
        return turn

    def end(self, turn: _Turn) -> None:
        """Once for each turn, be it that it is finished or that nobody waits for it any more."""
        del self._turns[turn.name]
        self.replica.cancel(turn.name)

    async def run(self) -> None:
        """Step for ever."""
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            while not self.replica.busy:  # what arrived may have been cancelled by the time this wakes
                self._arrival.clear()
                await self._arrival.wait()
                due = clock()
            result = self.replica.step(due * self._speed)
            due += result.seconds / self._speed
            await asyncio.sleep(due - clock())
            self._publish(result.finished)

    def _publish(self, finished: Sequence[Finished]) -> None:
        over = {each.name: each for each in finished}
        for name, turn in self._turns.items():
            if name in over:
                turn.finished, turn.generated = over[name], len(turn.output)
                turn.news.set()
            elif turn.streaming and turn.finished is None:
                turn.generated = self.replica.generated(name)
                turn.news.set()


@dataclass(frozen=True, slots=True)
class _Format:
    """How an API names its answers and where it puts text."""

    whole_kind: str
    part_kind: str
    whole: Callable[[str], dict[str, Any]]
    part: Callable[[str], dict[str, Any]]


_CHAT = _Format(
    "chat.completion",
    "chat.completion.chunk",
    lambda text: {"message": {"role": "assistant", "content": text}},
    lambda text: {"delta": {"role": "assistant", "content": text}},
)
_TEXT = _Format(
    "text_completion", "text_completion", lambda text: {"text": text}, lambda text: {"text": text}
)


def tokenize(text: str) -> np.ndarray:
    """int32 tokens of a text: the numbers in it; a word that is no token id stands for one all the same."""
    if text.isascii() and text.replace(" ", "").isdigit():
        numbers = np.fromstring(text, np.int64, sep=" ")  # several times faster, and most texts are such
        if numbers.max() < _TOKENS:
            return numbers.astype(np.int32)
    words = text.split()
    tokens = [int(word) if word.isdecimal() and int(word) < _TOKENS else _token_of(word) for word in words]
    return np.array(tokens, np.int32)


def _token_of(word: str) -> int:
    return zlib.crc32(word.encode()) % _TOKENS


def detokenize(tokens: np.ndarray) -> str:
    """The text of tokens, which `tokenize` turns back into them."""
    return " ".join(map(str, tokens.tolist()))


def _messages(body: dict[str, Any]) -> np.ndarray:
    """The tokens of all messages; roles have none, so that a longer dialogue extends a shorter one."""
    texts = []
    for message in body["messages"]:
        content = message.get("content") or ""
        texts += [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return tokenize(" ".join(texts))


def _prompt(given: Any) -> np.ndarray:
    """Text, or a list of token ids."""
    return tokenize(given) if isinstance(given, str) else np.array(given, np.int32).reshape(len(given))


@contextmanager
def _checked() -> Iterator[None]:
    """What does not fit in a request is answered with a status of 400, as the real servers do."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        answer = {"error": {"message": f"{type(error).__name__}: {error}", "code": 400}}
        raise web.HTTPBadRequest(text=json.dumps(answer), content_type="application/json") from None


class MockServer:
    """The routes of one replica.

    Attributes:
        engine: what serves.
        number: of the replica; each response's `x-replica` header.
    """

    def __init__(self, engine: Engine, number: int) -> None:
        self.engine, self.number = engine, number

    def application(self) -> web.Application:
        """All routes, with the engine running beside them."""
        application = web.Application(client_max_size=64 * 2**20)  # a long prompt as text
        application.on_response_prepare.append(self._name_replica)
        application.cleanup_ctx.append(self._stepping)
        application.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/state", self._state),
                *(web.get(path, self._info) for path in ("/server_info", "/get_server_info")),
                *(web.get(path, self._info) for path in ("/model_info", "/get_model_info")),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/chat/completions/render", self._tokenize),
                web.post("/v1/completions", self._completions),
                web.post("/generate", self._generate),
                web.post("/tokenize", self._tokenize),
                web.post("/reset_prefix_cache", self._reset),
            ]
        )
        return application

    async def _name_replica(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-replica"] = str(self.number)

    async def _stepping(self, application: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self.engine.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": MODEL, "object": "model", "created": 0, "owned_by": "nemo-war", "root": MODEL}
        return web.json_response({"object": "list", "data": [entry]})

    async def _info(self, request: web.Request) -> web.Response:
        config = self.engine.replica.config
        return web.json_response(
            {
                "model_path": MODEL,
                "tokenizer_path": MODEL,
                "served_model_name": MODEL,
                "is_generation": True,
                "max_total_num_tokens": config.kv_blocks * config.block_size,
                "max_running_requests": config.max_running,
                "page_size": config.block_size,
            }
        )

    async def _state(self, request: web.Request) -> web.Response:
        return web.json_response({"replica": self.number, **asdict(self.engine.replica.statistics)})

    async def _reset(self, request: web.Request) -> web.Response:
        self.engine.replica.reset_cache()
        return web.json_response({"success": True})

    async def _tokenize(self, request: web.Request) -> web.Response:
        with _checked():
            body = await request.json()
            tokens = (_messages(body) if "messages" in body else _prompt(body["prompt"])).tolist()
        return web.json_response({"count": len(tokens), "tokens": tokens, "token_ids": tokens})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        with _checked():
            body = await request.json()
            turn = self._begin(_messages(body), body)
        return await self._answer(request, turn, body, _CHAT)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        with _checked():
            body = await request.json()
            turn = self._begin(_prompt(body["prompt"]), body)
        return await self._answer(request, turn, body, _TEXT)

    def _begin(self, prompt: np.ndarray, body: dict[str, Any]) -> _Turn:
        outputs = body.get("max_completion_tokens") or body.get("max_tokens") or _OUTPUT_TOKENS
        return self.engine.begin(prompt, int(outputs), streaming=bool(body.get("stream")))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """SGLang's own API; answered in one piece."""
        with _checked():
            body = await request.json()
            prompt = _prompt(body["input_ids"] if "input_ids" in body else body["text"])
            outputs = int((body.get("sampling_params") or {}).get("max_new_tokens", _OUTPUT_TOKENS))
            turn = self.engine.begin(prompt, outputs, streaming=False)
        try:
            await turn.news.wait()
        finally:
            self.engine.end(turn)
        meta = {
            "id": turn.name,
            "finish_reason": {"type": "length", "length": outputs},
            "prompt_tokens": len(turn.prompt),
            "completion_tokens": len(turn.output),
            "cached_tokens": turn.cached_tokens,
        }
        text, tokens = detokenize(turn.output), turn.output.tolist()
        return web.json_response({"text": text, "output_ids": tokens, "meta_info": meta})

    async def _answer(
        self, request: web.Request, turn: _Turn, body: dict[str, Any], form: _Format
    ) -> web.StreamResponse:
        head = {"id": turn.name, "created": 0, "model": MODEL}
        try:
            if turn.streaming:
                with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
                return await _stream(request, turn, {**head, "object": form.part_kind}, form, with_usage)
            await turn.news.wait()
        finally:
            self.engine.end(turn)
        choice = {"index": 0, "finish_reason": "length", **form.whole(detokenize(turn.output))}
        answer = {**head, "object": form.whole_kind, "choices": [choice], "usage": turn.usage}
        return web.json_response(answer)


async def _stream(
    request: web.Request, turn: _Turn, head: dict[str, Any], form: _Format, with_usage: bool
) -> web.StreamResponse:
    """Server-sent events: the tokens of each step, the usage if it is wanted, and the end."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    sent = 0
    while turn.finished is None:
        await turn.news.wait()
        turn.news.clear()
        if turn.generated > sent:
            text = (" " if sent else "") + detokenize(turn.output[sent : turn.generated])
            sent = turn.generated
            reason = "length" if turn.finished else None
            await _send(
                response, {**head, "choices": [{"index": 0, "finish_reason": reason, **form.part(text)}]}
            )
    if with_usage:
        await _send(response, {**head, "choices": [], "usage": turn.usage})
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until interrupted."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if min(arguments.block_size, arguments.speed) <= 0:
        parser.error("--block-size and --speed must be larger than 0")
    try:
        config = _config(arguments)
    except (UserError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    server = MockServer(Engine(config, arguments.speed), arguments.number)
    web.run_app(
        server.application(),
        host=arguments.host,
        port=arguments.port,
        print=None,
        access_log=None,
        handler_cancellation=True,  # a client that goes away takes its request with it
    )


def _config(arguments: argparse.Namespace) -> ReplicaConfig:
    prior = StepTimePrior(
        base=arguments.base_ms,
        per_request=arguments.per_request_ms,
        per_token=arguments.per_token_ms,
        per_kilotoken=arguments.per_kilotoken_ms,
    )
    return ReplicaConfig(
        kv_blocks=arguments.kv_tokens // arguments.block_size,
        block_size=arguments.block_size,
        max_running=arguments.max_running,
        max_batched_tokens=arguments.max_batched_tokens,
        step_time=StepTimeModel(prior),
    )


def _parser() -> argparse.ArgumentParser:
    prior = StepTimePrior()
    parser = argparse.ArgumentParser("nemo_war.simulation.server", description="A mock replica over HTTP.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--number", type=int, default=0, help="goes into each response's x-replica header")
    parser.add_argument("--kv-tokens", type=int, default=400_000, help="size of the KV cache")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block")
    parser.add_argument("--max-running", type=int, default=256, help="most requests in a step")
    parser.add_argument("--max-batched-tokens", type=int, default=8192, help="most tokens in a step")
    parser.add_argument("--speed", type=float, default=1.0, help="model seconds in a second")
    parser.add_argument("--base-ms", type=float, default=prior.base, help="time of any step")
    parser.add_argument("--per-request-ms", type=float, default=prior.per_request)
    parser.add_argument("--per-token-ms", type=float, default=prior.per_token, help="each token computed")
    parser.add_argument("--per-kilotoken-ms", type=float, default=prior.per_kilotoken, help="attended to")
    return parser


if __name__ == "__main__":
    main()
