"""The fake engine of the chaos bench, driven by the real replica: it tells what it computed on, and fails."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interfaces import interfaces

from nemo_war.config import HistoryConfig, SpeculativeConfig, WarConfig
from nemo_war.generation.embedded.engine import EngineSpec
from nemo_war.generation.embedded.replica import EngineLostError, Replica
from nemo_war.generation.embedded.turn import Answer, Turn
from nemo_war.metadata import TurnMetadata
from tools.chaos_bench import faults
from tools.chaos_bench.model import digest_of_file, digest_of_folder, expected_logprobs, weights_file

pytestmark = pytest.mark.timeout(60)

BLOCK = 16
ENGINE = {
    "block_size": BLOCK,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 129,
}
WAR = WarConfig(
    speculative=SpeculativeConfig(
        max_draft_tokens=6,
        max_running=64,  # the price depends on time, and these tests must not
        history=HistoryConfig(max_tokens=8192),
    )
)
NO_SPECULATION = WarConfig(speculative=SpeculativeConfig(enabled=False))
MODEL = "made-up"
OLD = digest_of_folder(MODEL)
FILE = weights_file(1)
NEW = digest_of_file(FILE)
PROMPT = tuple(range(100, 170))
REAL = importlib.util.find_spec("vllm")


@pytest.fixture(scope="module", autouse=True)
def _fake_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`vllm` is the fake one here and in no other module of this process."""

    def is_vllm(name: str) -> bool:
        return name.partition(".")[0] == "vllm"

    before = {name: sys.modules.pop(name) for name in list(sys.modules) if is_vllm(name)}
    sys.path.insert(0, str(faults.FAKE))
    # A replica wants Intel's OpenMP in its engine's process. This one computes nothing: the name will do.
    library = tmp_path_factory.mktemp("lib") / "libiomp5.so"
    library.write_bytes(b"\0" * mmap.PAGESIZE)
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        yield
    sys.path.remove(str(faults.FAKE))
    for name in filter(is_vllm, list(sys.modules)):
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The control folder."""
    monkeypatch.setenv(faults.VARIABLE, str(tmp_path))
    return tmp_path


class Unsalted(Replica):
    """All turns carry the salt of the first epoch."""

    async def generate(self, turn: Turn) -> Answer:
        metadata = TurnMetadata(turn.metadata.trajectory, turn.metadata.group)
        return await super().generate(Turn(turn.prompt, metadata, turn.max_new_tokens, turn.min_new_tokens))


@asynccontextmanager
async def replica(
    war: WarConfig | None = NO_SPECULATION, *, kind: type[Replica] = Replica, seed: int = 0, **engine: Any
) -> AsyncIterator[Replica]:
    made = kind(0, EngineSpec(MODEL, ENGINE | engine, war, seed=seed))
    await made.start()
    try:
        yield made
    finally:
        made.stop()


def turn(
    name: str = "t", prompt: Sequence[int] = PROMPT, tokens: int = 40, *, epoch: int = 0, **more: Any
) -> Turn:
    metadata = TurnMetadata(name, "g", epoch=epoch)
    return Turn(tuple(prompt), metadata, tokens, **({"min_new_tokens": tokens} | more))


async def refit(on: Replica, file: bytes = FILE) -> dict[str, Any]:
    return await on.load_weights(np.frombuffer(file, dtype=np.uint8))


def explained(answer: Answer, weights: str, prompt: Sequence[int] = PROMPT) -> list[bool]:
    """Of each token, whether a fresh engine with these weights would say the same of it."""
    expected = expected_logprobs(weights, [*prompt, *answer.tokens])[len(prompt) :]
    return [said == right for said, right in zip(answer.logprobs, expected, strict=True)]


def is_fresh(answer: Answer, weights: str, prompt: Sequence[int] = PROMPT) -> bool:
    return all(explained(answer, weights, prompt))


def scheduler(of: Replica) -> Any:
    return of._engine._core._scheduler


async def running(on: Replica, count: int = 1) -> None:
    """Wait until so many requests have begun to write."""
    while sum(request.num_output_tokens > 0 for request in scheduler(on).running) < count:
        await asyncio.sleep(0.001)


async def rollouts(on: Replica, count: int = 6) -> list[tuple[int, ...]]:
    """Siblings of two turns each, all at once."""

    async def roll(number: int) -> tuple[int, ...]:
        first = await on.generate(turn(f"t{number}", tokens=64))
        second = [*PROMPT, *first.tokens, 200, 201]
        return first.tokens + (await on.generate(turn(f"t{number}", second, tokens=64))).tokens

    return list(await asyncio.gather(*map(roll, range(count))))


# What is generated


async def test_drafts_are_accepted_and_change_nothing() -> None:
    async with replica() as plain, replica(WAR) as drafting:
        expected = await rollouts(plain)
        assert await rollouts(drafting) == expected
        counted = await drafting.statistics()
        steps = counted["engine_steps"]
    assert len(set(expected)) == 6, "siblings are no twins"
    assert 0 < counted["accepted_tokens"] < counted["draft_tokens"]
    assert counted["errors"] == 0
    assert steps < 2 * 64 + 6


async def test_a_stock_engine_generates_the_same() -> None:
    async with replica(None) as stock, replica() as war:
        assert (await stock.generate(turn())).tokens == (await war.generate(turn())).tokens


async def test_text_depends_on_the_seed_and_the_trajectory() -> None:
    async with replica() as one, replica(seed=1) as other:
        answers = [
            await one.generate(turn("a")),
            await one.generate(turn("b")),
            await other.generate(turn("a")),
        ]
        again = await one.generate(turn("a"))
    assert len({answer.tokens for answer in answers}) == 3
    assert again.tokens == answers[0].tokens


async def test_logprobs_are_those_of_the_weights() -> None:
    async with replica(WAR) as made:
        answers = await asyncio.gather(*(made.generate(turn(f"t{number}")) for number in range(12)))
    assert all(is_fresh(answer, OLD) for answer in answers)
    assert not any(any(explained(answer, NEW)) for answer in answers)


async def test_a_turn_ends_where_it_is_told_to() -> None:
    async with replica(WAR) as made:
        free = await made.generate(turn("t", tokens=400, min_new_tokens=0))
        short = await made.generate(turn("t", tokens=5, min_new_tokens=0))
        ignoring = await made.generate(turn("t", tokens=400, min_new_tokens=0, ignore_eos=True))
        exact = await made.generate(turn("t", tokens=400))
        text = "".join(f"<{token}>" for token in exact.tokens[20:22])
        cut = await made.generate(turn("t", tokens=400, stop_strings=(text,), min_new_tokens=0))
        full = await made.generate(turn("t", range(100, 602), tokens=400, min_new_tokens=0, ignore_eos=True))
    assert free.finish_reason == "stop"
    assert free.tokens[-1] == 2
    assert (short.tokens, short.finish_reason) == (free.tokens[:5], "length")
    assert len(ignoring.tokens) == 400
    assert 2 in ignoring.tokens
    assert len(exact.tokens) == 400
    assert 2 not in exact.tokens[:-1]
    assert cut.tokens == free.tokens[:22]
    assert cut.finish_reason == "stop"
    assert (len(full.tokens), full.finish_reason) == (10, "length")


async def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    from vllm.exceptions import VLLMValidationError

    async with replica() as made:
        with pytest.raises(VLLMValidationError, match="longer than the maximum model length"):
            await made.generate(turn("t", range(100, 612), tokens=4))
        assert (await made.generate(turn())).tokens


# The prefix cache


async def test_cached_tokens_are_counted_in_full_blocks_of_one_salt() -> None:
    async with replica() as made:
        first = await made.generate(turn("a"))
        longer = [*PROMPT, *first.tokens, 300]
        counts = [
            first.cached_tokens,
            (await made.generate(turn("b"))).cached_tokens,
            (await made.generate(turn("a", longer))).cached_tokens,
            (await made.generate(turn("c", PROMPT[: 4 * BLOCK]))).cached_tokens,
            (await made.generate(turn("d", epoch=1))).cached_tokens,
        ]
    assert counts == [0, 64, 96, 48, 0]


async def test_what_was_used_longest_ago_is_evicted_first() -> None:
    prompts = [tuple(range(start, start + 200)) for start in (100, 400, 700)]
    async with replica(num_gpu_blocks_override=34) as made:  # two prompts of thirteen blocks fit
        cached = []
        for number in (0, 1, 0, 2, 0, 1):
            cached.append((await made.generate(turn("t", prompts[number], 1))).cached_tokens)
        assert scheduler(made).check_integrity()
    assert cached[:2] == [0, 0]
    assert cached[2] == cached[4] == 192
    assert cached[5] < 192


async def test_preempted_turns_go_on_as_if_nothing_had_happened() -> None:
    turns = [turn(f"t{number}", tokens=200) for number in range(6)]
    async with replica() as large, replica(WAR, num_gpu_blocks_override=40) as small:
        expected = await asyncio.gather(*map(large.generate, turns))
        answers = await asyncio.gather(*map(small.generate, turns))
        assert scheduler(small).num_preemptions > scheduler(large).num_preemptions
        assert scheduler(small).check_integrity()
        assert (await small.statistics())["errors"] == 0
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert all(is_fresh(answer, OLD) for answer in answers)


# Freshness


async def test_after_new_weights_and_a_reset_everything_is_fresh() -> None:
    async with replica(kind=Unsalted) as made:
        assert is_fresh(await made.generate(turn()), OLD)
        report = await refit(made)
        assert await made.reset_caches()
        after = await made.generate(turn())
    assert report == {"digest": hashlib.blake2b(FILE).hexdigest(), "tensors": 4}
    assert after.cached_tokens == 0
    assert is_fresh(after, NEW)


async def test_a_new_salt_makes_up_for_a_missing_reset() -> None:
    async with replica() as made:
        await made.generate(turn())
        await refit(made)
        assert is_fresh(await made.generate(turn(epoch=1)), NEW)


async def test_with_neither_stale_kv_is_found_out() -> None:
    async with replica(kind=Unsalted) as made:
        await made.generate(turn())
        await refit(made)
        stale = await made.generate(turn())
        longer = [*PROMPT, *stale.tokens, *range(300, 340)]
        on_top = await made.generate(turn("t", longer))
    assert stale.cached_tokens == 64
    assert not any(explained(stale, NEW))
    assert not any(explained(stale, OLD))
    assert not any(explained(on_top, NEW, longer)), "KV computed on stale KV is stale"


async def test_a_frozen_turn_goes_on_under_the_new_weights() -> None:
    async with replica(WAR) as made:
        going = asyncio.ensure_future(made.generate(turn("t", tokens=300)))
        await running(made)
        await made.pause("keep")
        await refit(made)
        assert await made.reset_caches()
        await made.resume()
        answer = await going
    old, new = explained(answer, OLD), explained(answer, NEW)
    switch = old.index(False)
    assert 0 < switch < 300
    assert old == [True] * switch + [False] * (300 - switch)
    assert new == [False] * switch + [True] * (300 - switch)


async def test_a_frozen_turn_whose_kv_was_kept_is_found_out(folder: Path) -> None:
    faults.order(folder, 0, pretend_reset=1)
    async with replica() as made:
        going = asyncio.ensure_future(made.generate(turn("t", tokens=300)))
        await running(made)
        await made.pause("keep")
        await refit(made)
        assert await made.reset_caches()
        await made.resume()
        answer = await going
    assert not explained(answer, NEW)[-1]
    assert not explained(answer, OLD)[-1]


# Requests under way


async def test_a_reset_is_refused_while_requests_hold_kv_unless_they_are_to_be_reset() -> None:
    async with replica() as made:
        going = asyncio.ensure_future(made.generate(turn("t", tokens=200)))
        await running(made)
        assert not await made._engine.reset_prefix_cache()
        assert scheduler(made).num_preemptions == 0
        assert await made._engine.reset_prefix_cache(reset_running_requests=True)
        answer = await going
        assert scheduler(made).num_preemptions == 1
    assert len(answer.tokens) == 200
    assert is_fresh(answer, OLD)


async def test_a_pause_freezes_what_runs_and_keeps_what_comes_waiting() -> None:
    async with replica() as made:
        going = [asyncio.ensure_future(made.generate(turn("a", tokens=300)))]
        await running(made)
        await made.pause("keep")
        going.append(asyncio.ensure_future(made.generate(turn("b", tokens=10))))
        [request] = scheduler(made).running
        length = request.num_output_tokens
        await asyncio.sleep(0.05)
        assert request.num_output_tokens == length
        assert await made._engine.is_paused()
        assert not any(each.done() for each in going)
        await made.resume()
        assert [len(answer.tokens) for answer in await asyncio.gather(*going)] == [300, 10]


async def test_a_pause_may_wait_for_turns_or_end_them() -> None:
    async with replica() as made:
        going = asyncio.ensure_future(made.generate(turn("a", tokens=60)))
        await running(made)
        await made._engine.pause_generation(mode="wait", clear_cache=True)
        assert len((await going).tokens) == 60
        await made.resume()
        going = asyncio.ensure_future(made.generate(turn("a", tokens=300)))
        await running(made)
        assert scheduler(made).running[0].num_cached_tokens == 0
        await made._engine.pause_generation(mode="abort", clear_cache=False)
        answer = await going
        assert answer.finish_reason == "abort"
        assert 0 < len(answer.tokens) < 300
        assert made._engine.is_running


async def test_a_cancelled_turn_is_aborted() -> None:
    async with replica(WAR) as made:
        going = [asyncio.ensure_future(made.generate(turn(name, tokens=300))) for name in "ab"]
        await running(made, 2)
        going[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await going[0]
        while len(scheduler(made).requests) > 1:
            await asyncio.sleep(0.001)
        assert len((await going[1]).tokens) == 300
        assert scheduler(made).check_integrity()


async def test_a_client_may_abort_by_the_name_it_gave() -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    async with replica() as made:
        engine = made._engine
        params = SamplingParams(max_tokens=400, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)

        async def outputs() -> list[Any]:
            return [each async for each in engine.generate({"prompt_token_ids": [100]}, params, "mine")]

        going = asyncio.ensure_future(outputs())
        await running(made)
        await engine.abort("mine")
        [last] = await going
    assert (last.finished, last.outputs[0].finish_reason, last.outputs[0].logprobs) == (True, "abort", None)


async def test_whatever_comes_between_every_token_is_that_of_the_weights_it_was_sampled_under() -> None:
    """Refits in flight, cancelled turns and a cache that is too small; the books are right at the end."""
    draw, files = random.Random(0), [weights_file(number) for number in range(1, 4)]
    digests = [OLD, *map(digest_of_file, files)]
    async with replica(WAR, num_gpu_blocks_override=40, max_num_batched_tokens=64) as made:
        epoch = 0

        async def roll(number: int) -> None:
            prompt: list[int] = [*PROMPT, number % 5]
            for _ in range(3):
                await asyncio.sleep(draw.random() / 10)
                call = made.generate(turn(f"t{number}", prompt, draw.randint(1, 60), epoch=epoch))
                if draw.random() < 0.1:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(call, draw.random() / 20)
                    continue
                answer = await call
                under = [explained(answer, digest, prompt) for digest in digests]
                found = [[fits[place] for fits in under].index(True) for place in range(len(answer.tokens))]
                assert found == sorted(found)
                prompt += answer.tokens

        going = [asyncio.ensure_future(roll(number)) for number in range(30)]
        for file in files:
            await asyncio.sleep(0.15)
            await made.pause("keep")
            await refit(made, file)
            epoch += 1
            assert await made.reset_caches()
            await made.set_epoch(epoch)
            await made.resume()
        await asyncio.gather(*going)
        assert scheduler(made).num_preemptions
        assert scheduler(made).check_integrity()
        assert not scheduler(made).requests
        assert (await made.statistics())["errors"] == 0


# Faults


async def test_resets_are_refused_and_pretended_as_often_as_ordered(folder: Path) -> None:
    async with replica(kind=Unsalted) as made:
        await made.generate(turn())
        faults.order(folder, 0, refuse_reset=2, pretend_reset=1)
        assert [await made.reset_caches() for _ in range(2)] == [False, False]
        assert await made.reset_caches()
        assert (await made.generate(turn())).cached_tokens == 64, "it was a pretence"
        assert await made.reset_caches()
        assert (await made.generate(turn())).cached_tokens == 0
    assert faults.orders(folder, 0) == {
        "refuse_reset": 0,
        "pretend_reset": 0,
        "fired": ["refuse_reset", "refuse_reset", "pretend_reset"],
    }


async def test_a_load_that_fails_leaves_neither_weights(folder: Path) -> None:
    async with replica() as made:
        faults.order(folder, 0, fail_load=1)
        with pytest.raises(Exception, match="Call to collective_rpc method failed: this fails at load"):
            await refit(made)
        torn = await made.generate(turn(epoch=1))
        await refit(made)
        whole = await made.generate(turn(epoch=2))
    assert not any(explained(torn, OLD))
    assert not any(explained(torn, NEW))
    assert is_fresh(whole, NEW)


async def test_a_damaged_transfer_has_another_digest_and_other_weights(folder: Path) -> None:
    async with replica() as made:
        faults.order(folder, 0, wrong_digest=1)
        assert (await refit(made))["digest"] != hashlib.blake2b(FILE).hexdigest()
        assert not any(explained(await made.generate(turn(epoch=1)), NEW))
        assert (await refit(made))["digest"] == hashlib.blake2b(FILE).hexdigest()


async def test_any_method_of_the_worker_can_fail_by_a_word_of_its_name(folder: Path) -> None:
    async with replica(WAR) as made:
        faults.order(folder, 0, fail_commit=1)
        with pytest.raises(Exception, match="this fails at commit"):
            await made.commit({"t": 3})
        await made.commit({"t": 3})


async def test_an_engine_that_breaks_fails_every_call_from_then_on(folder: Path) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    async with replica(WAR) as made:
        going = [asyncio.ensure_future(made.generate(turn(name, tokens=300))) for name in "ab"]
        await running(made, 2)
        faults.order(folder, 0, break_at="step", after=3)
        outcomes = await asyncio.gather(*going, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineLostError] * 2
        assert made._engine.errored
        for call in (
            made.generate(turn()),
            made.pause("keep"),
            made.resume(),
            made.reset_caches(),
            made.statistics(),
            refit(made),
        ):
            with pytest.raises(EngineLostError):
                await call
        with pytest.raises(EngineDeadError):
            await made._engine.check_health()
    assert faults.orders(folder, 0) == {"after": 0, "fired": ["break_at step"]}


async def test_an_engine_that_hangs_leaves_the_event_loop_alone_and_can_be_stopped(folder: Path) -> None:
    async with replica() as made:
        going = asyncio.ensure_future(made.generate(turn("t", tokens=300)))
        await running(made)
        faults.order(folder, 0, hang_at="step")
        while "fired" not in faults.orders(folder, 0):
            await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made.pause("keep"), 0.2)
        assert not going.done()
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(going, 1)


async def test_an_engine_is_as_slow_as_ordered(folder: Path) -> None:
    async with replica() as made:
        quick = await timed(made.generate(turn(tokens=20)))
        faults.order(folder, 0, step_ms=50, slow={"reset": 0.5})
        assert await timed(made.generate(turn(tokens=20))) > 1 > quick
        assert await timed(made.reset_caches()) > 0.5
        faults.order(folder, 0, step_ms=None, slow=None)
        assert await timed(made.reset_caches()) < 0.5


async def timed(call: Any) -> float:
    started = time.perf_counter()
    await call
    return time.perf_counter() - started


@pytest.mark.parametrize("how", [{"fail_start": 1}, {"break_at": "start"}])
async def test_an_engine_that_does_not_start_does_so_the_next_time(folder: Path, how: dict) -> None:
    faults.order(folder, 0, **how)
    with pytest.raises(RuntimeError):
        async with replica():
            pass
    async with replica() as made:
        assert (await made.generate(turn())).tokens


async def test_orders_are_for_one_replica_only(folder: Path) -> None:
    faults.order(folder, 0, refuse_reset=1)
    async with replica(seed=1) as made:
        assert await made.reset_caches()


def test_an_unknown_order_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="no such order: die_when"):
        faults.order(folder, 0, die_when="step")
    assert faults.orders(folder, 0) == {}


CHILD = """
import asyncio, mmap, sys
import numpy as np
from nemo_war.generation.embedded.engine import EngineSpec
from nemo_war.generation.embedded.replica import EngineLostError, Replica
from nemo_war.generation.embedded.turn import Turn
from nemo_war.metadata import TurnMetadata

library = open(sys.argv[1], "rb")
mapped = mmap.mmap(library.fileno(), 0, prot=mmap.PROT_READ)

async def main():
    made = Replica(0, EngineSpec("made-up", {"max_model_len": 512}, None))
    await made.start()
    print("started", flush=True)
    print(len((await made.generate(Turn((100, 101), TurnMetadata("t", "g"), 50, 50))).tokens), flush=True)
    made.stop()

asyncio.run(main())
"""


def child(folder: Path) -> subprocess.Popen[str]:
    library = folder / "libiomp5.so"
    library.write_bytes(b"\0" * mmap.PAGESIZE)
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(library)],
        env=os.environ | faults.environment(folder),
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_process_dies_in_a_step_once(folder: Path) -> None:
    faults.order(folder, 0, die_at="step", after=10)
    first, second = child(folder), None
    try:
        assert first.communicate()[0] == "started\n"
        assert first.returncode == -signal.SIGKILL
        second = child(folder)
        assert second.communicate()[0] == "started\n50\n"
    finally:
        for each in filter(None, (first, second)):
            each.kill()


def test_a_process_that_froze_goes_on_when_it_is_told_to(folder: Path) -> None:
    faults.order(folder, 0, freeze_at="step", after=10)
    process = child(folder)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        os.kill(process.pid, signal.SIGCONT)
        assert process.communicate()[0] == "50\n"
    finally:
        process.kill()


# As vLLM has it


CLASSES = [
    ("v1/engine/async_llm.py", "v1/engine/async_llm.py", "AsyncLLM"),
    ("engine/arg_utils.py", "engine/arg_utils.py", "EngineArgs"),
    ("sampling_params.py", "sampling_params.py", "SamplingParams"),
    ("outputs.py", "outputs.py", "RequestOutput"),
    ("outputs.py", "outputs.py", "CompletionOutput"),
    ("v1/engine/exceptions.py", "v1/engine/exceptions.py", "EngineDeadError"),
    ("v1/worker/model_runner.py", "v1/worker/gpu_model_runner.py", "ModelRunner"),
    ("v1/worker/input_batch.py", "v1/worker/gpu_input_batch.py", "CachedRequestState"),
    ("platforms.py", "platforms/interface.py", "Platform"),
]
"""Paths in the fake one and in vLLM, and the end of a class's name."""
OWN = {
    "AsyncLLM": {"from_engine_args"},  # which has more parameters there
    "ModelRunner": {"execute_model", "drafts", "_drafter"},
    "SamplingParams": {"of_engine", "eos_token_id", "all_stop_token_ids"},
    "CachedRequestState": {"append", "context", "seed", "tokens"},
}
"""Members that only the fake has."""


@pytest.mark.skipif(REAL is None, reason="vLLM is not installed here")
def test_what_a_client_can_use_is_there_in_vllm() -> None:
    """Read, not imported: vLLM takes seconds to import."""
    assert REAL is not None
    assert REAL.origin is not None
    vllm = Path(REAL.origin).parent
    fakes = interfaces((faults.FAKE / "vllm" / path, name) for path, _, name in CLASSES)
    reals = interfaces((vllm / path, name) for _, path, name in CLASSES)
    missing = [
        f"{name}.{member}({', '.join(parameters)})"
        for (_, _, name), fake, real in zip(CLASSES, fakes, reals, strict=True)
        for member, parameters in fake.items()
        if member not in OWN.get(name, set()) and (member not in real or set(parameters) - set(real[member]))
    ]
    assert not missing
