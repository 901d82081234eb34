"""WAR's generation behind NeMo-RL's interface: where requests go, what they say, and what comes back."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from nemo_rl.experience.failures import GenerationUnavailable
from nemo_rl.models.generation.fleet_health import (
    FleetHealthPolicy,
    GenerationFleetHealth,
    HealthyShardSelector,
)
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl_world import ALONE, WAR, answers, batch, configuration, generation, until

from nemo_war import snapshot
from nemo_war.errors import ConfigError
from nemo_war.generation.nemo_rl.checkpoints import WarCheckpointManager
from nemo_war.generation.nemo_rl.generation import WarGeneration, validating
from nemo_war.metadata import TurnMetadata
from nemo_war.routing.facts import Outcome

KEYS = {"output_ids", "generation_lengths", "unpadded_sequence_lengths", "logprobs", "truncated"}
FIRST = list(range(100, 140))
ROTATION = {"routing": {"policy": "round_robin"}, "speculative": ALONE}


def said(engine: Any) -> list[TurnMetadata]:
    """Whose turns an engine was asked for."""
    turns = [TurnMetadata.from_extra_args(request.params.extra_args) for request in engine.requests]
    assert None not in turns
    return turns


def whole(answer: Any, row: int = 0) -> list[int]:
    return answer["output_ids"][row, : int(answer["unpadded_sequence_lengths"][row])].tolist()


async def ask(made: Any, *prompts: list[int]) -> list[Any]:
    async def one(prompt: list[int]) -> Any:
        [(_, answer)] = await answers(made.generate_async(batch(prompt)))
        return answer

    if len(prompts) == 1:  # NeMo-RL's loops ask for all turns of a trajectory from one task
        return [await one(prompts[0])]
    return list(await asyncio.gather(*map(one, prompts)))


@pytest.mark.parametrize("war", [None, {"enabled": False}])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_without_war_the_generation_and_its_workers_are_nemo_rls_own(war: Any, asynchronous: bool) -> None:
    with generation(asynchronous, war=war) as made:
        assert type(made) is VllmGeneration
        assert type(made.worker_group.workers[0].actor).__module__.startswith("nemo_rl.")
        assert all(engine.said == ["worker: report_device_id"] for engine in made.engines)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_with_war_it_is_ours_and_passes_for_nemo_rls(asynchronous: bool) -> None:
    with generation(asynchronous) as made:
        assert type(made) is WarGeneration
        assert isinstance(made, VllmGeneration)
        assert type(made.worker_group.workers[0].actor).__module__ == "nemo_war.generation.nemo_rl.worker"


def test_a_wrong_block_is_said_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match=r"policy\.generation\.war\.speculativ"):
        WarGeneration(None, configuration(war={"speculativ": {}}))


@pytest.mark.parametrize(("drafts", "asked"), [(True, "worker: war_attach"), (False, "worker: war_process")])
def test_drafters_of_all_leaders_are_attached_once_engines_are_there(drafts: bool, asked: str) -> None:
    war = {"speculative": {"enabled": drafts} | ALONE}
    cfg = configuration()["vllm_cfg"] | {"tensor_parallel_size": 2}
    with generation(gpus=4, war=war, vllm_cfg=cfg) as made:
        assert made.dp_size == 2
        assert all(engine.said == ["worker: report_device_id", asked] for engine in made.engines)


def test_where_models_are_loaded_later_drafters_are_attached_then() -> None:
    with generation(options={"defer_model_load": True}) as made:
        assert made.engines == [None, None]
        made.load_and_start()
        engines = [worker.actor.llm for worker in made.worker_group.workers]
        assert all(engine.said[-1] == "worker: war_attach" for engine in engines)
        asyncio.run(ask(made, FIRST))


# --- requests one by one -----------------------------------------------------------------


async def test_a_request_goes_where_the_scheduler_says_whatever_nemo_rls_turn_it_is() -> None:
    with generation(gpus=3, war=ROTATION) as made:
        made.current_generate_dp_shard_idx = 2
        for number in range(6):
            await ask(made, [number + 1, *FIRST])
        placed = [arguments[3].metadata for method, arguments in made.links[0].asked if method == "place"]
        assert len(placed) == 6
        assert [len(engine.requests) for engine in made.engines] == [2, 2, 2]
        assert made.current_generate_dp_shard_idx == 2


async def test_whose_turn_it_is_gets_to_the_engine() -> None:
    with generation() as made:
        first, *_ = await ask(made, FIRST, FIRST, [1, *FIRST])
        await ask(made, [*whole(first), 7])
        turns = [turn for engine in made.engines for turn in said(engine)]
        by_name: dict[str, list[TurnMetadata]] = {}
        for turn in turns:
            by_name.setdefault(turn.trajectory, []).append(turn)
        assert sorted(len(each) for each in by_name.values()) == [1, 1, 2]
        assert sorted(
            len({t.trajectory for t in turns if t.group == g}) for g in {t.group for t in turns}
        ) == [
            1,
            2,
        ]
        [continued] = [each for each in by_name.values() if len(each) == 2]
        assert [turn.turn for turn in continued] == [0, 1]


async def test_a_trajectory_stays_on_its_replica() -> None:
    with generation(gpus=4) as made:
        prompt = FIRST
        for turn in range(4):
            [answer] = await ask(made, prompt)
            prompt = [*whole(answer), turn + 1]
        assert sorted(len(engine.requests) for engine in made.engines) == [0, 0, 0, 4]


async def test_answers_have_the_keys_and_tokens_of_nemo_rls() -> None:
    with generation(war=None) as made:
        [stock] = await ask(made, FIRST)
    with generation() as made:
        [ours] = await ask(made, FIRST)
    assert ours.keys() == stock.keys() == KEYS | {"gen_leader_worker_idx"}
    assert whole(ours) == whole(stock)


async def test_the_callers_batch_stays_as_it_is() -> None:
    with generation() as made:
        asked = batch(FIRST)
        keys = set(asked)
        await answers(made.generate_async(asked))
        assert asked.keys() == keys


async def test_a_failure_comes_through_as_it_is_and_the_reservation_is_given_back() -> None:
    errors = []
    for war in (None, WAR):
        with generation(war=war) as made:
            for engine in made.engines:
                engine.fails = ValueError("min_p is not supported")
            with pytest.raises(GenerationUnavailable) as raised:
                await ask(made, FIRST)
            errors.append(raised.value)
            if war:
                until(made.links[0].idle)
    stock, ours = errors
    assert "min_p is not supported" in str(ours)
    assert str(ours).partition(":")[2] == str(stock).partition(":")[2]
    assert isinstance(ours.__cause__, ValueError)


async def test_a_request_after_one_that_failed_is_not_sent_where_that_was() -> None:
    with generation(war=ROTATION) as made:
        for engine in made.engines:
            engine.fails = ValueError("once")
        with pytest.raises(GenerationUnavailable):
            await answers(made.generate_async(batch(FIRST)))
        for engine in made.engines:
            engine.fails = None
        for _ in range(4):
            await answers(made.generate_text_async(texts("tell me")))
        assert [request.prompt["prompt"] for engine in made.engines for request in engine.requests[-2:]] == [
            "tell me"
        ] * 4


async def test_a_request_that_is_cancelled_gives_its_reservation_back_and_ends_at_the_worker() -> None:
    with generation() as made:
        for engine in made.engines:
            engine.held = True
        request = asyncio.ensure_future(ask(made, FIRST))
        while not any(engine.requests for engine in made.engines):
            await asyncio.sleep(0.001)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        until(made.links[0].idle)


def texts(*prompts: str) -> Any:
    return type(batch(FIRST))({"prompts": list(prompts)})


async def test_texts_are_left_to_nemo_rl() -> None:
    with generation() as made:
        for _ in range(4):
            [(_, answer)] = await answers(made.generate_text_async(texts("tell me")))
            assert answer.keys() == {"texts", "gen_leader_worker_idx"}
        assert [len(engine.requests) for engine in made.engines] == [2, 2]
        assert not made.links


async def test_what_nemo_rl_refuses_is_refused_and_nothing_is_nothing() -> None:
    with generation() as made:
        with pytest.raises(AssertionError):
            await answers(made.generate_async(batch(FIRST, FIRST)))
        assert await answers(made.generate_async(batch(FIRST).select_indices([]))) == []
        assert not made.links


async def test_shards_that_do_not_serve_are_not_chosen() -> None:
    with generation(gpus=3, war=ROTATION) as made:
        monitor = GenerationFleetHealth(shard_count=3, policy=FleetHealthPolicy(unhealthy_threshold=1))
        made.attach_fleet_health(monitor, HealthyShardSelector(monitor=monitor))
        monitor.report_failure(1, RuntimeError("died"))
        for number in range(4):
            await ask(made, [number + 1, *FIRST])
        assert [len(engine.requests) for engine in made.engines] == [2, 0, 2]
        monitor.report_refit(1, weight_version=1)
        for number in range(3):
            await ask(made, [number + 10, *FIRST])
        assert len(made.engines[1].requests) == 1
        assert [made.fleet_selector.inflight(shard) for shard in range(3)] == [0, 0, 0]


async def test_placement_hears_of_a_refit_with_the_first_turn_after_it() -> None:
    with generation(gpus=1) as made:
        await ask(made, FIRST)
        for future in made.update_weights_from_collective():
            assert await future is True
        await ask(made, [1, *FIRST])
        placed = [arguments[3].metadata for method, arguments in made.links[0].asked if method == "place"]
        assert [turn.epoch for turn in placed] == [0, 1]
        assert [turn.epoch for turn in said(made.engines[0])] == [0, 1]


async def test_what_was_cached_is_told_to_placement() -> None:
    with generation(gpus=1) as made:
        made.engines[0].cached = 16
        await ask(made, FIRST)
        until(made.links[0].idle)
        [outcome] = [arguments[-1] for method, arguments in made.links[0].asked if method == "finish"]
        assert outcome == Outcome(3, 16)


# --- batches -----------------------------------------------------------------------------


def turn(made: Any, prompts: list[list[int]]) -> list[list[int]]:
    """The texts of a batch after one more turn."""
    done = made.generate(batch(*prompts), greedy=True)
    assert done.keys() == KEYS
    texts = [whole(done, row) for row in range(len(prompts))]
    assert all(text[: len(prompt)] == prompt for text, prompt in zip(texts, prompts, strict=True))
    return texts


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_answers_of_a_batch_are_in_its_order_and_have_nemo_rls_keys(rows: int) -> None:
    prompts = [[number + 1] * (20 + number % 3) for number in range(rows)]
    with generation(asynchronous=False, gpus=3, war=None) as made:
        stock = turn(made, prompts)
    with generation(asynchronous=False, gpus=3) as made:
        assert turn(made, prompts) == stock
        assert [len(engine.requests) for engine in made.engines] != [rows, 0, 0] or rows == 1


def test_trajectories_stay_at_home_as_their_batch_shrinks() -> None:
    def moves(made: Any) -> int:
        """Turns on another replica than the one before."""
        where = {}
        for number, engine in enumerate(made.engines):
            for request in engine.requests:
                ids = request.prompt["prompt_token_ids"]
                where[ids[0], len(ids)] = number
        seen = sorted(where)
        return sum(a[0] == b[0] and where[a] != where[b] for a, b in pairwise(seen))

    moved = []
    for war in (None, WAR):
        with generation(asynchronous=False, war=war) as made:
            running = [[number] * 20 for number in range(1, 9)]
            for over in ((1, 2), (6, 7, 8), ()):
                done = turn(made, running)
                running = [[*text, 1] for text in done if text[0] not in over]
            moved.append(moves(made))
    assert moved == [2, 1], "five of six must not have to go; one of six has to, as shares are equal"
    names = {each.trajectory for engine in made.engines for each in said(engine)}
    assert len(names) == 8


def test_a_batch_that_fails_leaves_its_trajectories_where_they_were() -> None:
    with generation(asynchronous=False, gpus=1) as made:
        [text] = turn(made, [FIRST])
        made.engines[0].fails = RuntimeError("out of memory")
        with pytest.raises(RuntimeError, match="out of memory"):
            made.generate(batch([*text, 1]))
        turn(made, [[*text, 1]])
        assert [each.turn for each in said(made.engines[0])] == [0, 1, 2]


# --- a step, and what outlasts it --------------------------------------------------------


async def test_a_steps_metrics_are_nemo_rls_and_ours_since_the_step_before() -> None:
    with generation(gpus=2) as made:
        for engine in made.engines:
            engine.cached = 10
        taken = []
        for count in (2, 1):
            made.snapshot_step_metrics()
            await ask(made, *([number + 1, *FIRST] for number in range(count)))
            taken.append(made.get_step_metrics())
        assert [each["war/turns"] for each in taken] == [2, 1]
        assert [each["war/cached_tokens"] for each in taken] == [20, 10]
        assert all("vllm/spec_num_drafts" in each for each in taken)


async def test_what_is_generated_in_a_validation_does_not_enter_the_history() -> None:
    with generation(gpus=1) as made:
        with validating():
            await ask(made, FIRST)
        await ask(made, [1, *FIRST])
        assert [turn.learn for turn in said(made.engines[0])] == [False, True]


def test_a_checkpoint_has_what_was_learned_and_a_job_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WarGeneration, "resumed", None)
    manager = WarCheckpointManager({"checkpoint_dir": str(tmp_path)})
    with generation(gpus=2) as made:
        folder = manager.init_tmp_checkpoint(1, {})
        assert (folder / "nemo_war").is_dir()
        assert all(engine.said[-1] == "worker: war_save_state" for engine in made.engines)
        for number in range(2):
            (folder / f"nemo_war/replica-{number}{snapshot.SUFFIX}").touch()
    manager.finalize_checkpoint(folder)
    latest = manager.get_latest_checkpoint_path()
    assert manager.get_resume_paths(latest)[0] == tmp_path / "step_1/policy/weights"
    with generation(gpus=2) as made:
        assert all(engine.said[-1] == "worker: war_restore_state" for engine in made.engines)


def test_a_checkpoint_is_nemo_rls_where_ours_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = WarCheckpointManager({"checkpoint_dir": str(tmp_path)})
    with generation(gpus=1) as made:
        made.fleet.ask_all = lambda *_: ["the disk is full"]
        assert manager.init_tmp_checkpoint(1, {}).is_dir()
    assert "what was learned is not in this checkpoint: the disk is full" in capsys.readouterr().out


# --- the object --------------------------------------------------------------------------


async def test_a_copy_in_another_process_has_a_front_of_its_own() -> None:
    with generation() as made:
        await ask(made, FIRST)
        copy = WarGeneration.__new__(WarGeneration)
        copy.__dict__.update(made.__getstate__())
        assert copy._front is None
        [answer] = await ask(copy, FIRST)
        assert whole(answer)[: len(FIRST)] == FIRST
        assert copy.front is not made.front
        assert copy.front is copy.front
        names = {turn.trajectory for engine in made.engines for turn in said(engine)}
        assert len(names) == 2, "a copy's trajectories are not taken for the original's"
        copy.shutdown()


def test_shutting_down_ends_the_front_and_may_be_repeated() -> None:
    with generation() as made:
        asyncio.run(ask(made, FIRST))
        thread = made.front._thread
        assert made.shutdown()
        assert not thread.is_alive()
        assert made.shutdown()
