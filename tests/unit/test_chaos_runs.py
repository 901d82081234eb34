"""Faults of whole runs: their plan, their accounts, their means, and one of them from end to end."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from nemo_war.telemetry.log import EventStream
from nemo_war.telemetry.records import Pass, ResumeRecord, StepRecord
from tools.chaos_bench.damage import checkpoints, damage, damaged, print_of, weights_digest
from tools.chaos_bench.disk import disk
from tools.chaos_bench.run_account import Part, as_said, duplicated, lost, on_record, surviving
from tools.chaos_bench.run_plan import CORRUPT, RUN_KINDS, STEPS, drawn
from tools.chaos_bench.runs_result import RunsResult
from tools.chaos_bench.tiny import write_policy

LIVE = Pass("war", "live")


# The plan


def test_the_same_seed_makes_the_same_plan_and_kinds_come_alike() -> None:
    assert drawn(RUN_KINDS, 30, 1) == drawn(RUN_KINDS, 30, 1) != drawn(RUN_KINDS, 30, 2)
    plan = drawn(RUN_KINDS, 30, 1)
    assert Counter(fault.kind for fault in plan) == dict.fromkeys(RUN_KINDS, 5)
    damages = Counter(fault.damage for fault in plan if fault.kind == CORRUPT)
    assert damages == dict.fromkeys(("flip", "cut", "delete", "swap", "add"), 1)
    assert all((fault.damage is not None) == (fault.kind == CORRUPT) for fault in plan)


def test_no_fault_comes_when_a_run_may_be_over() -> None:
    for fault in drawn(RUN_KINDS, 300, 3):
        assert f"step {STEPS}/" not in fault.moment.said
        if fault.kind == CORRUPT:
            assert "saved as" in fault.moment.said
            assert "step 1/" not in fault.moment.said, "there is one before"


# The accounts


def step(number: int) -> StepRecord:
    return StepRecord(LIVE, number, 1, 1.0, 1.0, 1.0, 8, 8, 8, 8, 0, 0, 0.0)


def test_a_part_is_what_a_log_has_and_what_a_run_says() -> None:
    first = on_record(EventStream((step(0), step(1)), ()))
    assert first == Part(0, (0, 1))
    second = on_record(EventStream((ResumeRecord(LIVE, 1, 2, "d", "step_1"), step(1), step(2)), ()))
    assert second == Part(1, (1, 2))
    said = (
        "[ 0.0 s] resuming from /c/step_1: 1 of 4 steps are done\n"
        "[ 1.0 s] war step 2/4: live rollouts: 0/8\n"
        "[ 2.0 s] war step 2/4: 340 tokens in 0.1 s, reward 0.00\n"
        "[ 3.0 s] war step 3/4: 1 tokens in 0.1 s, reward 0.00\n"
    )
    assert as_said(said) == second
    assert as_said("") == Part(0, ())


def test_steps_behind_the_checkpoint_are_rightly_done_again_and_none_may_be_missing() -> None:
    whole = surviving([Part(0, (0, 1, 2)), Part(2, ()), Part(2, (2, 3))])
    assert whole == [0, 1, 2, 3]
    assert lost(whole, 4) == duplicated(whole) == []
    assert lost(surviving([Part(0, (0,)), Part(2, (2, 3))]), 4) == ["step 1 was never done"]
    assert lost(surviving([Part(0, (0, 1))]), 3) == ["step 2 was never done"]
    assert duplicated(surviving([Part(0, (0, 1)), Part(2, (1, 2))])) == ["step 1 was done 2 times"]
    assert surviving([Part(0, (0, 1)), Part(0, (0, 1, 2))]) == [0, 1, 2], "it started anew"


# Damage


def checkpoint(folder: Path, step: int) -> Path:
    made = folder / f"step_{step}"
    files = {"policy/weights.safetensors": b"w" * 50, "war/replica-0.state": b"s" * 50}
    for name, content in files.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(content + bytes([step]))
    listed = {
        name: {"size": 51, "blake2b": hashlib.blake2b((made / name).read_bytes()).hexdigest()}
        for name in files
    }
    (made / "training_info.json").write_text(json.dumps({"weights_digest": f"d{step}", "files": listed}))
    return made


@pytest.mark.parametrize("how", ["flip", "cut", "delete", "swap", "add"])
def test_damage_touches_one_file_and_is_found(tmp_path: Path, how: str) -> None:
    for seed in range(12):
        folder = tmp_path / str(seed)
        one, two = checkpoint(folder, 1), checkpoint(folder, 10)
        assert checkpoints(folder) == [one, two]
        assert weights_digest(two) == "d10"
        assert damaged(one) + damaged(two) == []
        before = print_of(folder)
        name = damage(two, how, Random(seed), one)  # type: ignore[arg-type]
        after = print_of(folder)
        changed = {each for each in before.keys() | after.keys() if before.get(each) != after.get(each)}
        assert changed == {f"step_10/{name}"}
        assert damaged(one) == []
        if name != "training_info.json":  # which has a checksum of its own, that is not looked at here
            assert name in damaged(two)[0]


# Means


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")
def test_a_small_disk_is_full_until_it_is_freed(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", 1 << 16) as small:
        small.fill()
        with pytest.raises(OSError, match="No space left"):
            (small.folder / "more").write_bytes(b"x" * 5000)
        small.free()
        (small.folder / "more").write_bytes(b"x" * 5000)
    assert not list((tmp_path / "disk").iterdir())


def test_the_tiny_tokenizer_says_what_it_reads_and_knows_a_tool_call(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    folder = write_policy(tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Compute 2*3 → <calc>2*3</calc>\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer) == AutoConfig.from_pretrained(folder).vocab_size
    last = tokenizer.decode([len(tokenizer) - 1])
    assert last.startswith("<calc>")
    assert last.endswith("</calc>")
    assert tokenizer.eos_token_id == 2


def test_what_is_wrong_is_said() -> None:
    result = RunsResult(0)
    assert not result.wrong
    result.broken.append("status 1")
    result.recoveries["kill_run"] += [1.0, 3.0]
    assert result.wrong == ["status 1"]
    assert result.to_json()["recovery_s"] == {"kill_run": {"median": 2.0, "worst": 3.0, "faults": 2}}
