"""A replica: one vLLM engine in a Ray actor of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from typing import Any

from nemo_war.generation.drafter_host import DrafterHost
from nemo_war.generation.embedded import sampling
from nemo_war.generation.embedded.engine import EngineSpec
from nemo_war.generation.embedded.turn import Answer, Turn
from nemo_war.generation.memory_file import memory_file
from nemo_war.generation.self_check import Probe

ABORTED = "abort"
"""Finish reason of a turn that was taken back, as vLLM calls it."""


class EngineLostError(RuntimeError):
    """The engine behind this actor is dead."""


class Replica(DrafterHost):
    """The actor's body; `actors` wraps it with `ray.remote`.

    Every method but `start` needs a started engine, and raises EngineLostError where that
    is dead. Methods that change weights or caches are called by the fleet's refit only.
    """

    def __init__(self, number: int, spec: EngineSpec) -> None:
        super().__init__(number, spec.speculates)
        self._spec = spec
        self._engine: Any = None
        self._epoch = 0

    async def process(self) -> int:
        """Number of the actor's process."""
        return os.getpid()

    async def ping(self) -> None:
        """Answer once the engine's worker does, which is between two steps."""
        await self.call("war_process")

    async def start(self) -> dict[str, Any]:
        """Start the engine and prove what runs in it.

        Returns:
            The worker's process facts, and `kv_tokens`, the capacity of its KV cache.

        Raises:
            RuntimeError: speculation is configured and our proposer is not active, or
                the engine runs without Intel's OpenMP.
        """
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(**self._spec.engine_arguments(self._number))
        self._engine = AsyncLLM.from_engine_args(arguments)
        try:
            facts = await self.call("war_attach" if self.speculates else "war_process")
            if not facts["libiomp"]:
                raise RuntimeError(
                    "libiomp5.so is not mapped in the engine's worker, although LD_PRELOAD names it"
                )
            await self._restore_history()
        except Exception as error:
            self.stop()
            raise RuntimeError(f"replica {self._number} did not start as configured: {error}") from error
        return facts

    async def generate(self, turn: Turn) -> Answer:
        """Generate one turn; a cancelled call aborts the request.

        Raises:
            EngineLostError: the engine died.
        """
        with _telling_of_loss():
            return await self._generate(turn)

    async def _generate(self, turn: Turn) -> Answer:
        spec, epoch = self._spec, self._epoch
        params = sampling.params_of(turn, spec.temperature, spec.stop_token_ids)
        started, first, last = time.perf_counter(), 0.0, None
        request = f"{turn.metadata.trajectory}/{turn.metadata.turn}/{uuid.uuid4().hex[:8]}"
        async for output in self._engine.generate(
            sampling.prompt_of(turn, salted=spec.war is not None), params, request
        ):
            first = first or time.perf_counter() - started
            last = output
        if last is None:
            raise RuntimeError(f"vLLM returned nothing for {request}")
        epochs = (epoch, self._epoch)
        return sampling.answer_of(last, first, epochs, self._engine.get_tokenizer().decode)

    async def probe(self) -> Probe:
        """Say what the model expects after a prompt that never changes; nothing is learned from it."""
        with _telling_of_loss():
            salts = [f"epoch-{self._epoch}" if self._spec.war else None, f"alone-{uuid.uuid4().hex}"]
            return Probe(*await asyncio.gather(*map(self._probe, salts)))

    async def _probe(self, salt: str | None) -> dict[int, float]:
        params = sampling.params_of_probe()
        prompt = sampling.PROBE if salt is None else {**sampling.PROBE, "cache_salt": salt}
        async for output in self._engine.generate(prompt, params, f"self-check/{uuid.uuid4().hex}"):
            last = output
        return {token: entry.logprob for token, entry in last.outputs[0].logprobs[0].items()}

    async def pause(self, mode: str) -> None:
        """Run nothing until `resume`: freeze what runs (`keep`), or take it back (`abort`)."""
        with _telling_of_loss():
            await self._engine.pause_generation(mode=mode, clear_cache=False)

    async def resume(self) -> None:
        """Let frozen and new requests run."""
        with _telling_of_loss():
            await self._engine.resume_generation()

    async def load_weights(self, blob: Any) -> dict[str, Any]:
        """Load weights into the engine.

        Args:
            blob: [bytes] uint8 array holding a safetensors file, a view into Ray's
                object store. The engine lives in another process, which reads it from
                an anonymous memory file; nothing is written to a disk.
        """
        with memory_file(f"weights-{self._number}") as file:
            file.write(blob)
            return await self.call("war_load_weights", file.path)

    async def reset_caches(self) -> bool:
        """Make the KV of the old weights unreachable, running requests included.

        Returns:
            vLLM's own answer: whether the caches are empty now.
        """
        engine = self._engine
        with _telling_of_loss():
            await engine.reset_mm_cache()
            await engine.reset_encoder_cache()
            return bool(await engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True))

    async def set_epoch(self, epoch: int) -> None:
        """What is generated from here on is of this policy epoch."""
        self._epoch = epoch
        await self.advance_epoch(epoch)

    async def _restore_history(self) -> None:
        if self._spec.war is not None and not self._spec.resumes:
            await self.restore_history(self._spec.war.speculative.history)

    def stop(self) -> None:
        """Shut the engine and its processes down; may be called twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    async def call(self, method: str, *arguments: Any) -> Any:
        """A worker extension method's answer. Every rank is asked; rank 0 is the output rank at PP=1."""
        with _telling_of_loss():
            return (await self._engine.collective_rpc(method, args=arguments))[0]


@contextlib.contextmanager
def _telling_of_loss() -> Iterator[None]:
    """vLLM's own error as ours: whoever unpickles an error of vLLM's imports vLLM, which takes seconds."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineLostError(str(error)) from None
