"""Real fleets for tests, and what tests ask of them."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from nemo_war.config import HealthConfig, RefitConfig, WarConfig
from nemo_war.generation.embedded.engine import EngineSpec
from nemo_war.generation.embedded.fleet import Fleet
from nemo_war.generation.embedded.replica import Replica
from nemo_war.generation.embedded.turn import Answer, Turn
from nemo_war.generation.refit import Transition
from nemo_war.metadata import TurnMetadata
from nemo_war.routing.facts import Books, ReplicaFacts, Waiting
from nemo_war.routing.policy import Policy

ENGINE = {
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1024,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 2**28,
    "enable_prefix_caching": True,
}

_names = itertools.count()


class Pinned(Policy):
    """Places every turn on one replica; tests say which."""

    def __init__(self, replica: int = 0) -> None:
        super().__init__()
        self._replica = replica

    def choose(self, turn: Waiting, candidates: Sequence[ReplicaFacts], books: Books, now: float) -> int:
        return self._replica


class RawReplica(Replica):
    """Takes any sampling parameters, as a client of vLLM's own server may send them."""

    aborts = 0

    async def aborted(self) -> int:
        """Requests that were aborted while they ran."""
        return self.aborts

    async def raw(
        self, prompt: Sequence[int], options: dict[str, Any], metadata: TurnMetadata
    ) -> list[RawAnswer]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        if "json" in options:
            schema = {key: value for key, value in options.items() if key == "json"}
            options = {key: value for key, value in options.items() if key != "json"}
            options["structured_outputs"] = StructuredOutputsParams(**schema)
        whole = RequestOutputKind.FINAL_ONLY  # or the `n` completions come one by one
        params = SamplingParams(extra_args=metadata.to_extra_args(), output_kind=whole, **options)
        try:
            async for output in self._engine.generate(
                {"prompt_token_ids": list(prompt)}, params, metadata.trajectory
            ):
                last = output
        except asyncio.CancelledError:
            self.aborts += 1
            raise
        return [
            RawAnswer(tuple(each.token_ids), each.text, str(each.finish_reason), len(each.logprobs or ()))
            for each in last.outputs
        ]

    async def ranks(self, method: str) -> list[Any]:
        """A worker method's answer from every rank."""
        return list(await self._engine.collective_rpc(method))


class RawAnswer(NamedTuple):
    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: int


async def raw(
    on: Fleet,
    prompt: Sequence[int],
    *,
    replica: int = 0,
    group: str = "g",
    critical: bool = False,
    learn: bool = True,
    **options: Any,
) -> list[RawAnswer]:
    """One request with these sampling parameters."""
    metadata = TurnMetadata(f"t{next(_names)}", group, critical=critical, learn=learn)
    return await on.ask_one(replica, "raw", prompt, options, metadata)


@asynccontextmanager
async def fleet(
    model: Path,
    *,
    war: WarConfig | None = None,
    replicas: int = 1,
    in_flight: str = "drain",
    refit: RefitConfig | None = None,
    health: HealthConfig | None = None,
    dtype: str = "bfloat16",
    extension: str | None = None,
    replica_class: type = Replica,
    temperature: float = 1.0,
    record: Callable[[Transition], None] = lambda transition: None,
    **engine: Any,
) -> AsyncIterator[Fleet]:
    spec = EngineSpec(
        str(model), ENGINE | {"dtype": dtype} | engine, war, temperature=temperature, extension=extension
    )
    kind = type("TestFleet", (Fleet,), {"replica_class": replica_class})
    refit = refit or RefitConfig(in_flight=in_flight, update_timeout_s=120)
    made = kind(spec, replicas, 1, refit, health, record)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def turn(
    prompt: Sequence[int], tokens: int, *, group: str = "g", epoch: int = 0, exact: bool = True, **more: Any
) -> Turn:
    metadata = TurnMetadata(f"t{next(_names)}", group, epoch=epoch, learn=more.pop("learn", True))
    return Turn(tuple(prompt), metadata, tokens, tokens if exact else 0, exact, **more)


async def sample(
    fleet: Fleet, replica: int, prompt: Sequence[int], tokens: int, count: int, **more: Any
) -> list[Answer]:
    """`count` independent samples, at most 16 at a time."""
    gate, dispatcher = asyncio.Semaphore(16), fleet.dispatcher(Pinned(replica))

    async def one() -> Answer:
        async with gate:
            return (await fleet.generate(turn(prompt, tokens, epoch=fleet.epoch, **more), dispatcher))[1]

    return list(await asyncio.gather(*(one() for _ in range(count))))


async def statistics(fleet: Fleet, replica: int = 0) -> Counter[str]:
    return Counter(await fleet.ask_one(replica, "statistics"))


def chat(model: Path) -> Any:
    from transformers import AutoTokenizer

    from nemo_war.generation.embedded.chat import Chat

    return Chat(AutoTokenizer.from_pretrained(model))


def copy_prompt(model: Path, lines: int = 8, seed: int = 0) -> list[int]:
    """A prompt whose answer is mostly a copy of it."""
    import random

    names = random.Random(seed).sample(
        ["alpha", "beta", "gamma", "delta", "port", "host", "size", "mode", "user", "path"], lines
    )
    text = "\n".join(f"{name} = {index * 7 + seed}" for index, name in enumerate(names))
    return chat(model).prompt(
        [{"role": "user", "content": f"Print this file again, exactly as it is:\n{text}"}]
    )


def begun_copy(model_folder: Path, seed: int) -> list[int]:
    """A copy with its first line written: what follows is likely, and never certain."""
    prompt = copy_prompt(model_folder, seed=seed)
    text = chat(model_folder).text(prompt)
    first_line = text[text.index("as it is:\n") + len("as it is:\n") :].splitlines()[0]
    return prompt + chat(model_folder).encode(first_line + "\n")
