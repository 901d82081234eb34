"""Recorded and synthetic token sequences."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest

from nemo_war.errors import UserError
from nemo_war.speculative.history import SuffixHistory
from nemo_war.speculative.workload import read_recorded, read_trace, synthetic_texts


def encode(text: str) -> list[int]:
    return list(text.encode())


def said(tokens: np.ndarray) -> str:
    return bytes(tokens.astype(np.uint8)).decode()


def test_tau_bench_attempts_at_a_task_are_a_group_and_attempts_are_epochs(tmp_path):
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    }
    trajectory = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}, call]
    trajectory += [{"role": "tool", "content": "T"}, {"role": "assistant", "content": "A"}]
    entries = [{"task_id": task, "trial": trial, "traj": trajectory} for task in (3, 4) for trial in (0, 1)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(entries))
    recorded = read_recorded(path, encode)
    assert [(each.group, each.epoch) for each in recorded] == [
        ("trace/3", 0),
        ("trace/4", 0),
        ("trace/3", 1),
        ("trace/4", 1),
    ]
    (first, called), (second, answer) = recorded[0].turns
    assert (
        said(first)
        == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )
    assert said(called) == '\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'
    assert said(second) == "\n<|im_start|>tool\nT<|im_end|>\n<|im_start|>assistant\n"
    assert said(answer) == "A<|im_end|>"


def test_nemo_gym_attempts_at_an_instance_are_a_group(tmp_path):
    output = [
        {"type": "reasoning", "summary": [{"text": "R"}]},
        {"type": "function_call", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "output": "T"},
        {"type": "message", "role": "assistant", "content": [{"text": "A"}]},
    ]
    swe = {"input": [], "metadata": {"instance_id": "x", "problem_statement": "P"}}
    entries = [
        {"responses_create_params": given, "response": {"output": output}}
        for given in (swe, swe, {"input": "Q"})
    ]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    recorded = read_recorded(path, encode)
    assert [(each.group, each.epoch) for each in recorded] == [
        ("rollouts/x", 0),
        ("rollouts/2", 0),
        ("rollouts/x", 1),
    ]
    assert [said(response) for _, response in recorded[1].turns][1] == "A<|im_end|>"
    assert said(recorded[0].turns[0][1]).startswith("<think>R</think>\n<tool_call>")


@pytest.mark.parametrize("content", ["[{}]", "not json", '{"response": 3}', "[" * 100_000])
def test_another_kind_of_file_is_refused(tmp_path, content):
    path = tmp_path / "other"
    path.write_text(content)
    with pytest.raises(UserError, match="neither tau-bench nor NeMo-Gym"):
        read_recorded(path, encode)


def test_a_history_of_ones_own_is_read_turn_by_turn(tmp_path):
    history = SuffixHistory(4096, 4)
    slot = history.begin("t", "g", 3, np.array([1, 2, 3], np.int32))
    history.extend(np.array([slot], np.int32), np.array([[7, 8]], np.int32), np.array([2], np.int32))
    history.end(slot)
    slot = history.begin("t", "g", 3, np.array([1, 2, 3, 7, 8, 4, 5], np.int32))
    history.extend(np.array([slot], np.int32), np.array([[9]], np.int32), np.array([1], np.int32))
    history.end(slot)
    folder = tmp_path / "run" / "history"
    folder.mkdir(parents=True)
    history.save(str(folder / "replica-0.suffixes"))
    (recorded,) = read_trace(tmp_path / "run", encode)
    assert [(p.tolist(), r.tolist()) for p, r in recorded.turns] == [([1, 2, 3], [7, 8]), ([4, 5], [9])]
    assert (recorded.group, recorded.epoch) == ("g", 3)


def test_replicas_that_remember_the_same_trajectory_do_not_count_it_twice(tmp_path):
    folder = tmp_path / "run" / "history"
    folder.mkdir(parents=True)
    for number, length in enumerate((5, 3)):
        history = SuffixHistory(4096, 4)
        slot = history.begin("t", "g", 0, np.arange(3, dtype=np.int32))
        history.extend(
            np.array([slot], np.int32), np.full((1, length), 9, np.int32), np.array([length], np.int32)
        )
        history.end(slot)
        history.save(str(folder / f"replica-{number}.suffixes"))
    (recorded,) = read_trace(tmp_path / "run", encode)
    assert len(recorded.turns[0][1]) == 5


def test_a_run_that_kept_no_history_is_told_from_a_recording(tmp_path):
    (tmp_path / "events.jsonl").write_text("{}")
    with pytest.raises(UserError, match="this run kept no history"):
        read_trace(tmp_path, encode)


def test_a_folder_without_recordings_is_refused(tmp_path):
    with pytest.raises(UserError, match="no recording in this folder"):
        read_trace(tmp_path, encode)


def test_synthetic_texts_depend_on_the_seed_only():
    first, again, other = (list(islice(synthetic_texts(seed, length=300), 5)) for seed in (1, 1, 2))
    assert all((a[1] == b[1]).all() for a, b in zip(first, again, strict=True))
    assert any((a[1] != b[1]).any() for a, b in zip(first, other, strict=True))
    assert [group for group, _ in islice(synthetic_texts(1, length=10, group=2), 4)] == ["group0"] * 2 + [
        "group1"
    ] * 2


def test_synthetic_texts_repeat_more_at_a_higher_rate_of_repetition():
    def repeated(rate: float) -> float:
        texts = [text for _, text in islice(synthetic_texts(0, repetition=rate, length=500), 30)]
        seen: set[bytes] = set()
        hits = total = 0
        for text in texts:
            grams = [text[at : at + 8].tobytes() for at in range(len(text) - 8)]
            hits, total = hits + sum(gram in seen for gram in grams), total + len(grams)
            seen.update(grams)
        return hits / total

    assert repeated(0.0) < 0.05 < repeated(0.5) < repeated(0.9)
