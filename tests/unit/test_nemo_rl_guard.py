"""No request and no weight update gets past the guard: both are told by the engine that they reach."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_war.config import WarConfig
from nemo_war.generation.nemo_rl.call import CALL, Call, Served
from nemo_war.generation.nemo_rl.guard import WEIGHT_UPDATES, AsyncGuard, Requests, StaleCacheError, SyncGuard
from nemo_war.metadata import TurnMetadata
from tests.double.engine import NEW, FakeAsyncLLM, FakeLLM, RequestOutputKind, SamplingParams

KINDS = pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
UPDATING = (
    "finish_sparse_delta_refit",
    "nccl_reshard_refit",
    "update_weights_from_checkpoint_engine",
    "update_weights_from_collective",
    "update_weights_via_ipc_zmq",
)
UPDATES = pytest.mark.parametrize("update", UPDATING)
NO_DRAFTS: dict[str, Any] = {"speculative": {"enabled": False}}
RESET = ["reset_prefix_cache, running ones too", "reset_mm_cache", "reset_encoder_cache"]
OTHERS = [
    "prepare_refit_info",
    "report_device_id",
    "war_commit",
    "update_weights_from_decoded_sparse_payload",
]
TURNS = [TurnMetadata("t1", "g", turn=2), TurnMetadata("t2", "g")]


@pytest.fixture(autouse=True)
def _no_call() -> None:
    CALL.set(None)


def guarded(asynchronous: bool, war: Any = None) -> tuple[Any, Any]:
    engine = FakeAsyncLLM() if asynchronous else FakeLLM()
    guard = AsyncGuard if asynchronous else SyncGuard
    return engine, guard(engine, WarConfig.model_validate(war or NO_DRAFTS))


async def rpc(engine: Any, method: str) -> Any:
    """As NeMo-RL calls it: on the engine, and not on the guard."""
    answer = engine.collective_rpc(method, args=())
    return await answer if asyncio.iscoroutine(answer) else answer


async def generate(engine: Any, *prompts: Any, params: Any = None) -> list[Any]:
    """What the engine itself was asked for."""
    params = params or SamplingParams()
    if isinstance(engine, FakeLLM):
        engine.generate(list(prompts), params, use_tqdm=False)
    else:
        for prompt in prompts:
            outputs = engine.generate(prompt=prompt, sampling_params=params, request_id="r")
            assert [output async for output in outputs]
    return engine.requests[-len(prompts) :]


def turn(request: Any) -> TurnMetadata | None:
    return TurnMetadata.from_extra_args(request.params.extra_args)


@KINDS
async def test_requests_are_salted_with_the_epoch_that_they_begin_in(asynchronous: bool) -> None:
    engine, _ = guarded(asynchronous)
    before = await generate(engine, {"prompt_token_ids": [1]}, {"prompt_token_ids": [2], "cache_salt": "own"})
    await rpc(engine, "update_weights_from_collective")
    [after] = await generate(engine, {"prompt_token_ids": [1]})
    assert [request.prompt["cache_salt"] for request in before] == ["epoch-0", "epoch-0/own"]
    assert after.prompt == {"prompt_token_ids": [1], "cache_salt": "epoch-1"}


@KINDS
async def test_a_request_says_whose_turn_it_is_and_in_which_epoch(asynchronous: bool) -> None:
    engine, guard = guarded(asynchronous)
    await rpc(engine, "nccl_reshard_refit")
    params = SamplingParams(extra_args={"theirs": 1})
    CALL.set(Call(TURNS[:1]))
    [request] = await generate(engine, "a", params=params)
    assert turn(request) == TurnMetadata("t1", "g", turn=2, epoch=1)
    assert request.params.extra_args["theirs"] == 1
    assert params == SamplingParams(extra_args={"theirs": 1}), "a batch may share it"
    guard.learning = False
    [request] = await generate(engine, "a", params=params)
    assert turn(request) == TurnMetadata("t1", "g", turn=2, epoch=1, learn=False)


async def test_each_row_of_a_batch_has_its_own_turn() -> None:
    engine, _ = guarded(asynchronous=False)
    CALL.set(Call(TURNS))
    assert [turn(request) for request in await generate(engine, "a", "b")] == TURNS
    assert [
        turn(request) for request in await generate(engine, "a", "b", params=[SamplingParams()] * 2)
    ] == TURNS


@KINDS
async def test_a_request_that_says_by_itself_whose_turn_it_is_is_believed(asynchronous: bool) -> None:
    engine, guard = guarded(asynchronous)
    guard.learning = False
    [request] = await generate(engine, "a", params=SamplingParams(extra_args=TURNS[0].to_extra_args()))
    assert turn(request) == TurnMetadata("t1", "g", turn=2, learn=False)


@KINDS
async def test_a_request_of_no_trajectory_keeps_its_parameters(asynchronous: bool) -> None:
    engine, _ = guarded(asynchronous)
    params = SamplingParams(extra_args={"theirs": 1})
    [request] = await generate(engine, "a", params=params)
    assert request.params is params


def test_all_updates_are_known() -> None:
    assert sorted(WEIGHT_UPDATES) == list(UPDATING)


@UPDATES
async def test_an_update_freezes_what_runs_resets_and_begins_an_epoch(update: str) -> None:
    engine, guard = guarded(asynchronous=True)
    assert await rpc(engine, update) == [True]
    assert engine.said == ["pause_generation, keep", f"worker: {update}", *RESET, "resume_generation"]
    assert guard.epoch == 1


@UPDATES
async def test_an_update_of_an_engine_that_sleeps_leaves_it_asleep(update: str) -> None:
    engine, guard = guarded(asynchronous=True)
    await engine.sleep()
    await rpc(engine, update)
    assert engine.said == ["sleep", f"worker: {update}", *RESET]
    assert await engine.is_paused()
    assert guard.epoch == 1


@UPDATES
async def test_an_update_of_a_synchronous_engine_resets_and_begins_an_epoch(update: str) -> None:
    engine, guard = guarded(asynchronous=False)
    assert await rpc(engine, update) == [True]
    assert engine.said == [f"worker: {update}", *RESET]
    assert guard.epoch == 1


@KINDS
@UPDATES
async def test_an_update_whose_reset_is_refused_is_an_error_and_nothing_serves(
    update: str, asynchronous: bool
) -> None:
    engine, guard = guarded(asynchronous)
    engine.refuses = True
    with pytest.raises(StaleCacheError, match="policy epoch 1"):
        await rpc(engine, update)
    assert guard.epoch == 1, "requests must not find what the epoch before left"
    assert not asynchronous or await engine.is_paused()


@KINDS
async def test_an_update_that_failed_may_have_changed_some_weights(asynchronous: bool) -> None:
    engine, guard = guarded(asynchronous)
    engine.fails = ConnectionError("a trainer is gone")
    with pytest.raises(ConnectionError, match="a trainer is gone"):
        await rpc(engine, "update_weights_from_collective")
    assert guard.epoch == 1
    assert set(RESET) <= set(engine.said)
    assert not asynchronous or not await engine.is_paused()


@KINDS
@pytest.mark.parametrize("method", OTHERS)
async def test_other_calls_of_workers_are_passed_on_as_they_are(method: str, asynchronous: bool) -> None:
    engine, guard = guarded(asynchronous)
    assert await rpc(engine, method) == [True]
    assert engine.said == [f"worker: {method}"]
    assert guard.epoch == 0


@KINDS
@pytest.mark.parametrize("every", [None, 1])
async def test_the_drafter_hears_of_the_epoch_and_of_which_arm_it_is(
    asynchronous: bool, every: int | None
) -> None:
    engine, guard = guarded(asynchronous, {"ab_every": every})
    await rpc(engine, "update_weights_from_collective")
    news = ["worker: war_advance_epoch"] + ["worker: war_enable_drafting"] * (every is not None)
    end = ["resume_generation"] * asynchronous
    assert engine.said[-len(news + end) :] == news + end
    assert (
        list(guard._news()) == [("war_advance_epoch", (1,)), ("war_enable_drafting", (False,))][: len(news)]
    )


@KINDS
async def test_a_drafter_that_does_not_hear_of_it_costs_drafts_only(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, guard = guarded(asynchronous, {})
    monkeypatch.setattr(guard, "_news", lambda: [("war_advance_epoch", None, "too many")])
    assert await rpc(engine, "update_weights_from_collective") == [True]
    assert guard.epoch == 1


@KINDS
async def test_a_call_is_told_what_became_of_its_requests(asynchronous: bool) -> None:
    engine, guard = guarded(asynchronous)
    await rpc(engine, "nccl_reshard_refit")
    engine.cached = 2
    call = Call()
    CALL.set(call)
    await generate(engine, {"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4]})
    assert call.served == [Served(1, 1, 2)] * 2
    assert replace(guard.requests, busy_seconds=0.0) == Requests(2, 0, 4, 4, 2 * NEW)
    assert guard.requests.busy_seconds > 0


async def test_a_request_that_an_update_interrupted_is_of_two_epochs() -> None:
    engine, guard = guarded(asynchronous=True)
    engine.held = True
    call = Call()
    CALL.set(call)
    running = asyncio.ensure_future(generate(engine, "a"))
    while not engine.requests:
        await asyncio.sleep(0.001)
    await rpc(engine, "update_weights_from_collective")
    engine.held = False
    await running
    assert call.served == [Served(0, 1, 0)]
    assert guard.requests.mixed_turns == 1


async def test_an_answer_in_pieces_is_counted_in_full() -> None:
    engine, guard = guarded(asynchronous=True)

    async def pieces(*_: Any, **__: Any) -> Any:
        for number in range(4):
            yield SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=[number])],
                finished=number == 3,
                prompt_token_ids=[1],
                num_cached_tokens=None,
            )

    guard._generate = pieces
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    assert len([each async for each in engine.generate("a", params, "r")]) == 4
    assert (guard.requests.output_tokens, guard.requests.cached_tokens) == (4, 0)


async def test_an_engine_is_busy_from_its_first_request_to_its_last_answered_or_not() -> None:
    engine, guard = guarded(asynchronous=True)
    engine.held = True
    running = [asyncio.ensure_future(generate(engine, "a")) for _ in range(2)]
    while len(engine.requests) < 2:
        await asyncio.sleep(0.001)
    running[0].cancel()
    await asyncio.sleep(0.02)
    assert guard.requests.busy_seconds == 0
    engine.held = False
    await running[1]
    assert guard.requests.busy_seconds >= 0.02
    assert guard.requests.turns == 1


@KINDS
@pytest.mark.parametrize("refuses", [True, False])
async def test_a_reset_says_whether_the_caches_are_empty(asynchronous: bool, refuses: bool) -> None:
    engine, guard = guarded(asynchronous)
    engine.refuses = refuses
    answer = guard.reset()
    assert (await answer if asynchronous else answer) is not refuses
    assert engine.said == RESET
    assert guard.epoch == 0
