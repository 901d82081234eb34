"""The chaos tool: its plans repeat, each of its checkers can convict, and a short run finds nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from nemo_war.generation.embedded.rollout import Trajectory
from nemo_war.generation.embedded.script import RecordedTurn
from nemo_war.generation.embedded.turn import Answer, Turn
from nemo_war.generation.refit import Stage, Transition
from nemo_war.metadata import TurnMetadata
from tools.chaos_bench import remains
from tools.chaos_bench.freshness import FakeModel, foreign, misdated, stale
from tools.chaos_bench.kinds import KINDS, possible
from tools.chaos_bench.memory import slope
from tools.chaos_bench.model import Context, expected_logprobs, logprob, next_token
from tools.chaos_bench.plan import SCHEDULER, drawn
from tools.chaos_bench.probes import disagreements
from tools.chaos_bench.result import Result
from tools.chaos_bench.scene import Scene
from tools.chaos_bench.watchdog import HUNG
from tools.chaos_bench.witness import Answered, Witness, misread
from tools.chaos_bench.workload import Sizes, Workload

ROOT = Path(__file__).parents[2]
PROMPT = tuple(range(20, 50))
MODEL = FakeModel({0: "zero", 1: "one", 2: "two"}, vocabulary=1024, end=2, longest=512)
SIZES = Sizes(
    tasks=4, groups=2, siblings=3, prompt=(5, 9), turns=(1, 3), output=(1, 8), observation=(1, 4),
    tokens=(16, 99),
)  # fmt: skip


# The plan


def test_the_same_seed_makes_the_same_plan() -> None:
    plans = [drawn(KINDS, 300, 4, 1.0, seed) for seed in (1, 1, 2)]
    assert plans[0] == plans[1]
    assert plans[0] != plans[2]


def test_a_plan_spares_one_replica_and_strikes_the_others_alike() -> None:
    for seed in range(8):
        plan = drawn(KINDS, 300, 4, 1.0, seed)
        struck = Counter(fault.replica for fault in plan.faults)
        assert plan.spared not in struck
        assert struck.pop(SCHEDULER) > 0
        assert max(struck.values()) - min(struck.values()) <= 1
        assert [fault.number for fault in plan.faults] == list(range(300))
    assert len({drawn(KINDS, 1, 4, 1.0, seed).spared for seed in range(20)}) == 4
    with pytest.raises(ValueError, match="it takes 2"):
        drawn(KINDS, 1, 1, 1.0, 0)


def test_every_kind_comes_as_often_as_its_share_says() -> None:
    shares = {name: kind.share for name, kind in KINDS.items()}
    plan = drawn(KINDS, 2 * sum(shares.values()), 3, 1.0, 0)
    assert Counter(fault.kind for fault in plan.faults) == {name: 2 * share for name, share in shares.items()}


def test_kinds_are_left_out_where_they_cannot_happen() -> None:
    assert "hang_pause" in possible(False, "abort")
    assert "hang_pause" not in possible(False, "drain"), "nobody is told to pause there"
    real = possible(True, "pause")
    assert {"kill_loading", "stop_turn", "refuse_reset", "fail_load"} <= real.keys()
    assert not any(name.startswith(("hang", "break", "die", "freeze")) for name in real)


def test_the_same_seed_makes_the_same_work_and_tasks_come_back() -> None:
    def steps(seed: int) -> list:
        work = Workload(SIZES, seed)
        return [[(start.name, start.group, start.script.prompt) for start in work.step(n)] for n in range(4)]

    assert steps(1) == steps(1) != steps(2)
    assert all(len(step) == 6 for step in steps(1))
    assert len({group for step in steps(1) for _, group, _ in step}) <= 4


# Every turn once


def turn(number: int = 0, prompt: Sequence[int] = PROMPT, tokens: int = 30, **more) -> Turn:
    return Turn(tuple(prompt), TurnMetadata("t", "g", number), tokens, **more)


def made(
    asked: Turn, policies: Sequence[int], *, replica: int = 1, epochs: tuple[int, int] | None = None
) -> Answered:
    """What a fake engine answers that has these policies, token by token."""
    context, tokens, logprobs = Context(asked.prompt), [], []
    name = f"{replica}/{asked.metadata.trajectory}/{asked.metadata.turn}"
    for place, policy in enumerate(policies):
        weights = MODEL.digests[policy]
        banned = {MODEL.end} if place < asked.min_new_tokens else ()
        token = next_token(weights, name, context, MODEL.vocabulary, MODEL.end, banned)
        tokens.append(token)
        logprobs.append(logprob(weights, frozenset({weights}), context, token))
        context.extend((token,))
        if token == MODEL.end:
            break
    epochs = epochs or (policies[0], policies[-1])
    reason = "stop" if tokens[-1] == MODEL.end else "length"
    return Answered(asked, replica, Answer(tuple(tokens), tuple(logprobs), reason, 0, 0.0, epochs), *epochs)


def rolled(first: Answered, second: Answered, given: tuple[int, ...] = (7, 8, 9)) -> Trajectory:
    trajectory = Trajectory("t", "g", [*PROMPT], [False] * 30, [0.0] * 30, 30)
    for each, observation in ((first, given), (second, None)):
        trajectory.append_generated(each.answer)
        trajectory.turns.append(RecordedTurn(len(each.answer.tokens), observation))
        trajectory.append_given(observation or ())
    return trajectory


def two_turns() -> tuple[Answered, Answered]:
    first = made(turn(min_new_tokens=30), [0] * 30)
    history = (*PROMPT, *first.answer.tokens, 7, 8, 9)
    return first, made(turn(1, history, min_new_tokens=30), [0] * 30)


def test_a_trajectory_of_its_turns_is_well() -> None:
    first, second = two_turns()
    assert misread(rolled(first, second), [first, second]) == ""


def test_a_trajectory_that_holds_anything_else_is_convicted() -> None:
    first, second = two_turns()
    whole = rolled(first, second)
    other = made(first.turn, [0] * 30, replica=2)
    assert "other tokens" in misread(rolled(other, second), [first, second])
    assert "in the place of turn 1" in misread(whole, [first, first])
    assert "more, or less" in misread(whole, [first])
    assert "another history" in misread(whole, [first, replace(second, turn=turn(1, PROMPT))])
    twice = rolled(first, second)
    twice.append_generated(second.answer)
    assert "more, or less" in misread(twice, [first, second])
    twice = rolled(first, second)
    twice.logprobs[-1] -= 0.1
    assert "more, or less" in misread(twice, [first, second])


def test_a_witness_counts_what_was_asked_answered_and_lost() -> None:
    witness = Witness()
    first, second = two_turns()
    for each in (first, second):
        witness.asks(each.turn)
        witness.tries(each.turn)
        witness.tries(each.turn)
    assert witness.pending.keys() == {("t", 0), ("t", 1)}
    witness.answers(first)
    witness.loses(second.turn, RuntimeError("no"))
    assert (witness.started, witness.finished, witness.most_attempts) == (2, 1, 2)
    assert witness.take_lost() == ["t turn 1: RuntimeError: no"]
    assert not witness.take_lost() + witness.take_again()
    witness.answers(first)
    witness.asks(first.turn)
    assert witness.take_again() == ["t turn 0 (replica 1) was answered twice", "t turn 0 was asked for twice"]
    assert witness.take("t") == [first, first]
    assert not witness.take("t")


# Freshness


def test_answers_of_one_policy_and_of_two_in_order_are_fresh() -> None:
    for policies in ([1] * 30, [0] * 12 + [1] * 18, [0] * 5 + [1] * 5 + [2] * 20):
        answered = made(turn(min_new_tokens=30), policies)
        assert stale(answered, MODEL) == foreign(answered, MODEL) == ""
        assert misdated(answered, frozen=True) == ""


def test_tokens_of_another_policy_are_stale() -> None:
    assert "token 0 of" in stale(made(turn(), [0] * 30, epochs=(1, 1)), MODEL)
    late = made(turn(min_new_tokens=30), [1] * 20 + [0] * 10, epochs=(0, 1))
    assert "token 20 of 30" in stale(late, MODEL), "the old policy does not come back"
    early = made(turn(), [1] * 30, epochs=(0, 1))
    assert "token 0 of" in stale(replace(early, ended=0), MODEL), "the fleet did not have it yet"


def test_tokens_on_kv_of_another_policy_are_stale() -> None:
    answered = made(turn(), [1] * 30)
    context = Context((*PROMPT, *answered.answer.tokens[:-1]))
    said = logprob("one", frozenset({"zero", "one"}), context, answered.answer.tokens[-1])
    logprobs = (*answered.answer.logprobs[:-1], said)
    found = stale(replace(answered, answer=replace(answered.answer, logprobs=logprobs)), MODEL)
    assert f"token {len(logprobs) - 1} of {len(logprobs)}" in found
    assert "logprobs for" in stale(replace(answered, answer=replace(answered.answer, logprobs=())), MODEL)


def test_tokens_of_two_attempts_are_not_one_answer() -> None:
    asked = turn(min_new_tokens=30)
    one, two = (made(asked, [0] * 30, replica=replica).answer.tokens for replica in (1, 2))
    tokens = (*one[:10], *two[10:])
    logprobs = tuple(expected_logprobs("zero", [*PROMPT, *tokens])[len(PROMPT) :])
    answered = Answered(asked, 1, Answer(tokens, logprobs, "length", 0, 0.0, (0, 0)), 0, 0)
    assert stale(answered, MODEL) == "", "each token is of the policy, given those before it"
    assert "was not sampled for it" in foreign(answered, MODEL)


def test_an_answer_that_breaks_off_is_not_one_answer() -> None:
    whole = made(turn(min_new_tokens=30), [0] * 30)
    short = replace(whole.answer, tokens=whole.answer.tokens[:9], logprobs=whole.answer.logprobs[:9])
    assert "ended after 9 tokens with 'length'" in foreign(replace(whole, answer=short), MODEL)
    taken_back = replace(whole.answer, finish_reason="abort")
    assert "with 'abort'" in foreign(replace(whole, answer=taken_back), MODEL)


@pytest.mark.parametrize(
    ("asked", "stamps", "answered", "frozen", "well"),
    [
        (1, (1, 1), 1, False, True),
        (1, (2, 2), 2, False, True),  # it waited for the refit
        (1, (0, 0), 1, False, False),  # of a replica that was left behind
        (1, (1, 2), 2, False, False),  # nobody may be frozen
        (1, (1, 2), 2, True, True),
        (1, (1, 2), 1, True, True),  # it ended as it was frozen
        (1, (1, 3), 1, True, False),
        (1, (0, 1), 1, True, False),
        (2, (2, 1), 2, True, False),
    ],
)
def test_stamps_have_to_be_of_epochs_that_the_caller_saw(asked, stamps, answered, frozen, well) -> None:
    answer = replace(made(turn(), [0]).answer, epochs=stamps)
    assert (misdated(Answered(turn(), 0, answer, asked, answered), frozen) == "") is well


def test_replicas_that_disagree_or_do_not_change_are_found_out() -> None:
    old, new = {1: -0.5, 2: -1.5}, {1: -0.9, 2: -1.2}
    close = {1: -0.5005, 2: -1.5}
    assert not disagreements(1, {0: old, 1: close})
    assert not disagreements(2, {0: new, 1: new}, (1, old))
    assert not disagreements(1, {0: close}, (1, old))
    assert disagreements(1, {0: old, 1: new})
    assert disagreements(1, {0: new}, (1, old))
    assert disagreements(2, {0: close}, (1, old))
    assert disagreements(1, {0: old, 1: {7: -0.5}}), "nothing in common"


# What is left over, what grows, what hangs


def test_a_process_that_is_left_behind_is_found() -> None:
    mark = f"mark {os.getpid()}"
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={remains.MARK: mark}
    )
    try:
        [found] = remains.processes(mark, patience_s=0.2)
        assert f"process {child.pid} " in found
        assert not remains.processes(mark, replicas_only=True)
    finally:
        child.kill()
        child.wait()
    assert not remains.processes(mark)


def test_an_open_memory_file_is_found() -> None:
    descriptor = os.memfd_create("weights-0")
    try:
        [found] = remains.memory_files(psutil.Process())
        assert "weights-0" in found
    finally:
        os.close(descriptor)
    assert not remains.memory_files(psutil.Process())


def test_a_slope_does_not_mind_outliers_or_the_warm_up() -> None:
    samples = [(float(n), 100 + 0.02 * n) for n in range(100)]
    assert slope(samples) == pytest.approx(20)
    warm = [(n, rss - 50 if n < 15 else rss) for n, rss in samples]
    assert slope([(n, 900.0 if n % 10 == 0 else rss) for n, rss in warm]) == pytest.approx(20, rel=0.2)
    assert slope([(float(n), 100.0) for n in range(100)]) == 0
    assert slope(samples[:5]) is None


async def test_a_scene_notices_what_lasts_for_a_moment() -> None:
    scene, stages = Scene(), [Stage.SERVING]

    def to(stage: Stage, reason: str = "") -> None:
        before, stages[0] = stages[0], stage
        scene.record(Transition(1, before, stage, 0, reason))

    waiting = asyncio.ensure_future(scene.until(lambda: stages[0] is Stage.RESETTING, 5))
    await asyncio.sleep(0)
    to(Stage.RESETTING)
    to(Stage.FENCED, "died")
    await waiting
    assert [reason for _, reason in scene.fences[1]] == ["died"]
    assert scene.changes == 2
    with pytest.raises(TimeoutError):
        await scene.until(lambda: False, 0.01)


HANGING = """
import asyncio, sys, time
from pathlib import Path
from tools.chaos_bench.watchdog import Watchdog

async def stuck():
    await asyncio.Event().wait()

async def main():
    dog.loop = asyncio.get_running_loop()
    if sys.argv[2] == "loop":
        time.sleep(60)
    await stuck()

dog = Watchdog(0.5, int, lambda: "all is quiet", lambda: None, Path(sys.argv[1]))
dog.start()
asyncio.run(main())
"""


@pytest.mark.parametrize(("what", "said"), [("task", "stuck:"), ("loop", "its event loop does not answer")])
def test_a_run_that_hangs_ends_and_says_what_waits(tmp_path: Path, what: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING, str(tmp_path / "hung.txt"), what],
        capture_output=True, text=True, timeout=40, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == HUNG
    for text in (done.stderr, (tmp_path / "hung.txt").read_text()):
        assert "nothing has happened for 0.5 s; the run hangs" in text
        assert said in text
    if what == "task":
        assert "all is quiet" in done.stderr


def test_what_is_wrong_is_said_in_a_sentence_each() -> None:
    result = Result(0, False, "drain", 4)
    assert not result.wrong
    result.lost = [f"turn {number}" for number in range(7)]
    result.orphans = ["process 1 was left behind"]
    result.failure = "NotSurvivedError: no"
    assert result.wrong == [
        "the run failed: NotSurvivedError: no",
        "7 lost: turn 0; turn 1; turn 2; turn 3; turn 4, and 2 more",
        "1 left over: process 1 was left behind",
    ]
    assert (result.to_json()["lost"], result.to_json()["orphans"]) == (7, 1)
