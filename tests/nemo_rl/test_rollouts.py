"""NeMo-RL's own rollout loops on its generation and on ours."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.rollouts import run_async_multi_turn_rollout, run_multi_turn_rollout

from tests.nemo_rl import world
from tests.nemo_rl.counting import TASK, Counting

pytestmark = pytest.mark.usefixtures("ray_cluster")

WAR = {"speculative": {"max_draft_tokens": 8}}
MEMBERS = list(itertools.product(range(3), range(3)))
"""An odd number: of an even one, two replicas in turn would get the same ones every time, by chance."""
TURNS = [2, 2, 2, 3, 3, 5, 6, 6, 6]
"""Of each; so the batch of those that go on gets smaller, and by position they change places."""


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def war(model_folder: Path, asynchronous: bool) -> Iterator[Any]:
    with world.generation(generation_config(model_folder, asynchronous, WAR)) as made:
        yield made


@pytest.fixture(scope="module")
def stock(model_folder: Path, asynchronous: bool) -> Iterator[Any]:
    with world.generation(generation_config(model_folder, asynchronous, None)) as made:
        yield made


def generation_config(model: Path, asynchronous: bool, war: Any) -> Any:
    """Turns end with a word: NeMo-RL takes an answer that its limit cut for the end of the trajectory."""
    stops = [" ", ",", ".", "\n"]
    return world.generation_config(
        model, asynchronous, war, max_new_tokens=48, ignore_eos=True, stop_strings=stops
    )


def rollouts(made: Any, model: Path) -> Any:
    """The final batch of three groups of three."""
    tokenizer = world.tokenizer(model)
    logs, metadata = [], []
    for (group, _), turns in zip(MEMBERS, TURNS, strict=True):
        text = f"Task {group}. Count from {group * 100} on, one number after the other, and never stop: "
        ids = torch.tensor(tokenizer.encode(text))
        logs.append([{"role": "user", "content": text, "token_ids": ids}])
        metadata.append({"turns": turns})
    size = len(logs)
    batch = BatchedDataDict(
        {
            "message_log": logs,
            "extra_env_info": metadata,
            "task_name": [TASK] * size,
            "length": torch.tensor([len(log[0]["token_ids"]) for log in logs]),
            "loss_multiplier": torch.ones(size),
            "idx": list(range(size)),
        }
    )
    run = run_async_multi_turn_rollout if made.cfg["vllm_cfg"]["async_engine"] else run_multi_turn_rollout
    done, _ = run(made, batch, tokenizer, {TASK: Counting.remote()}, max_seq_len=900)
    return done


def hits(made: Any) -> tuple[int, int]:
    """Prompt tokens so far, and those of them whose KV was cached."""
    counters: Counter[str] = Counter()
    leaders = [made.worker_group.get_dp_leader_worker_idx(shard) for shard in range(made.dp_size)]
    for said in ray.get(
        [made.worker_group.workers[each]._get_raw_spec_counters.remote() for each in leaders]
    ):
        counters.update({name: value for name, value in said.items() if isinstance(value, (int, float))})
    return int(counters["vllm:prefix_cache_queries"]), int(counters["vllm:prefix_cache_hits"])


def turns_of(done: Any) -> list[int]:
    return [sum(message["role"] == "assistant" for message in log) for log in done["message_log"]]


def test_trajectories_stay_where_their_kv_is(
    stock: Any, war: Any, asynchronous: bool, model_folder: Path
) -> None:
    """A batch keeps its order, and equal shares of it move as few trajectories as any order would: so far.

    What ours saves there is that those which moved once do not move back.
    """
    shares = []
    for made in (stock, war):
        done = rollouts(made, model_folder)
        turns = turns_of(done)
        assert done["total_reward"].tolist() == turns
        assert sum(turns) > 0.8 * sum(TURNS), "else there is little to find cached"
        queries, hit = hits(made)
        shares.append(hit / queries)
        print(f"\n{type(made).__name__}: turns {turns}, {hit} of {queries} prompt tokens cached")
    assert shares[1] > shares[0] * (1 if asynchronous else 0.95)


def test_later_steps_are_drafted_from_earlier_ones(war: Any, model_folder: Path) -> None:
    rollouts(war, model_folder)
    statistics = war.fleet.ask_all("statistics")
    assert sum(each["accepted_tokens"] for each in statistics) > 0
    assert all(each["errors"] == 0 for each in statistics)
