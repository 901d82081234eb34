"""WAR's workers on NeMo-RL's: engines are guarded at once, and answers say of which policy they are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from nemo_rl.models.generation.vllm import vllm_worker
from nemo_rl_world import answers, batch, configuration

from nemo_war.generation.nemo_rl.call import Served
from nemo_war.generation.nemo_rl.worker import SERVED, TURNS, WarAsyncWorkerImpl, WarSyncWorkerImpl
from nemo_war.metadata import TurnMetadata

KINDS = pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
TURN = TurnMetadata("t", "g", turn=1)
_OURS = "nemo_war.generation.nemo_rl.extension"


def worker(asynchronous: bool, war: Any = None, **changes: Any) -> Any:
    cls = WarAsyncWorkerImpl if asynchronous else WarSyncWorkerImpl
    return cls(configuration(asynchronous, war=war or {}, **changes), bundle_indices=[0], seed=5)


async def settled(answer: Any) -> Any:
    return await answer if asyncio.iscoroutine(answer) else answer


async def generated(made: Any, data: Any) -> Any:
    if isinstance(made, WarSyncWorkerImpl):
        return made.generate(data)
    [(_, answer)] = await answers(made.generate_async(data))
    return answer


def said(made: Any) -> list[TurnMetadata | None]:
    return [TurnMetadata.from_extra_args(request.params.extra_args) for request in made.llm.requests]


@KINDS
def test_an_engine_gets_our_extension_and_drafter(asynchronous: bool) -> None:
    arguments = worker(asynchronous, {"speculative": {"max_draft_tokens": 9}}).llm.arguments
    assert arguments["worker_extension_cls"] == f"{_OURS}.WarWorkerExtension"
    assert arguments["speculative_config"]["num_speculative_tokens"] == 9
    assert arguments["load_format"] == "dummy"


@KINDS
def test_without_drafts_it_gets_the_extension_only(asynchronous: bool) -> None:
    off = {"speculative": {"enabled": False}}
    arguments = worker(asynchronous, off, refit_transport="nixl").llm.arguments
    assert arguments["worker_extension_cls"] == f"{_OURS}.WarWorkerExtensionWithCheckpointEngine"
    assert not {"speculative_config", "additional_config"} & arguments.keys()


def test_a_worker_without_an_engine_is_made_as_stock_ones_are() -> None:
    assert WarAsyncWorkerImpl(configuration(war={})).llm is None


@KINDS
async def test_turns_are_taken_out_of_the_batch_and_put_into_requests(asynchronous: bool) -> None:
    made = worker(asynchronous)
    answer = await generated(made, batch([5, 6], **{TURNS: [TURN]}))
    assert said(made) == [TURN]
    assert answer.pop(SERVED) == [Served(0, 0, 0)]
    assert (
        answer.keys()
        == vllm_worker.answer_of(
            {"prompt_token_ids": [1]}, made.llm._answer({}, made.llm.requests[0].params)
        ).keys()
    )


@KINDS
async def test_turns_of_the_batch_before_do_not_stick(asynchronous: bool) -> None:
    made = worker(asynchronous)
    await generated(made, batch([5, 6], **{TURNS: [TURN]}))
    await generated(made, batch([5, 6]))
    await generated(made, batch([5, 6], **{TURNS: [TURN]}))
    text = type(batch([1]))({"prompts": ["tell me"]})
    if asynchronous:
        assert len(await answers(made.generate_text_async(text))) == 1
    else:
        made.generate_text(text)
    assert said(made) == [TURN, None, TURN, None]


async def test_an_answer_says_in_which_epochs_it_began_and_ended() -> None:
    made = worker(asynchronous=True)
    made.llm.held = True
    request = asyncio.ensure_future(generated(made, batch([5, 6])))
    while not made.llm.requests:
        await asyncio.sleep(0.001)
    assert await made.update_weights_via_ipc_zmq_async() is True
    made.llm.held = False
    assert (await request)[SERVED] == [Served(0, 1, 0)]


def test_each_row_of_a_batch_says_in_which_epoch_it_was_answered() -> None:
    made = worker(asynchronous=False)
    assert made.update_weights_from_collective()
    assert made.generate(batch([5], [6]))[SERVED] == [Served(1, 1, 0)] * 2
    assert made.generate(batch([5]).select_indices([]))[SERVED] == []


@KINDS
@pytest.mark.parametrize("refuses", [True, False])
async def test_a_reset_is_for_running_requests_too_and_says_what_vllm_says(
    asynchronous: bool, refuses: bool
) -> None:
    made = worker(asynchronous)
    made.llm.refuses = refuses
    reset = made.reset_prefix_cache_async if asynchronous else made.reset_prefix_cache
    assert await settled(reset()) is not refuses
    assert "reset_prefix_cache, running ones too" in made.llm.said


@KINDS
async def test_an_update_whose_reset_is_refused_fails_in_nemo_rls_eyes(asynchronous: bool) -> None:
    made = worker(asynchronous)
    made.llm.refuses = True
    names = ("update_weights_via_ipc_zmq", "update_weights_from_collective", "nccl_reshard_refit")
    for name in names:
        update = getattr(made, f"{name}_async" if asynchronous else name)
        assert await settled(update()) is False


@KINDS
async def test_drafters_are_called_by_the_methods_of_their_host(asynchronous: bool) -> None:
    made = worker(asynchronous)
    await settled_in_thread(made, "start")
    await settled_in_thread(made, "commit", {"t": 3})
    assert made.llm.said == ["worker: war_attach", "worker: war_commit"]
    assert await settled_in_thread(made, "epoch") == 0
    await settled_in_thread(made, "set_learning", False)
    await generated(made, batch([5, 6], **{TURNS: [TURN]}))
    [turn] = said(made)
    assert turn is not None
    assert not turn.learn


async def settled_in_thread(made: Any, *call: Any) -> Any:
    """A synchronous worker has no event loop of its own to be called in."""
    if isinstance(made, WarSyncWorkerImpl):
        return await asyncio.to_thread(made.war, *call)
    return await made.war(*call)
