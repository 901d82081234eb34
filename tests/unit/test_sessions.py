"""Sessions made of recordings."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from nemo_war.errors import UserError
from nemo_war.simulation.workload import (
    Caps,
    Session,
    SessionTurn,
    ToolDelays,
    from_recorded,
    read_coding_sessions,
    sample,
)
from nemo_war.speculative.workload import Recorded, read_trace

TRACES = Path(os.environ.get("NEMO_WAR_TRACES", "no traces"))


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def entry(at: float, blocks: list[int], extra: int, out: int, **more) -> dict:
    """A logged request whose prompt is these blocks and `extra` tokens."""
    return {"t": at, "type": "n", "in": 64 * len(blocks) + extra, "out": out, "hash_ids": blocks, **more}


def write(folder: Path, name: str, *requests: dict, **changes) -> Path:
    path = folder / f"{name}.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"id": name, "block_size": 64, "requests": requests, **changes}, file)
    return path


def read(path: Path, count: int = 1, **caps) -> list[Session]:
    return read_coding_sessions(path, count, 0, Caps(**caps))


def contexts(session: Session) -> list[np.ndarray]:
    """What each turn is asked, and its output."""
    found: list[np.ndarray] = []
    for turn in session.turns:
        found.append(np.concatenate([*([] if turn.reset else found[-1:]), turn.prompt, turn.output]))
    return found


def test_a_recorded_trajectory_keeps_its_turns_and_gets_tool_times():
    turns = ((tokens(1, 2), tokens(3)), (tokens(4), tokens(5, 6)), (tokens(7), tokens(8)))
    (session,) = from_recorded([Recorded("t", "g", 0, turns)], ToolDelays(), seed=1)
    assert (session.name, session.group) == ("t", "g")
    assert contexts(session)[-1].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [turn.delay_s > 0 for turn in session.turns] == [True, True, False]
    assert not any(turn.reset for turn in session.turns)


def test_tool_times_follow_the_seed_the_median_and_sigma():
    recorded = [Recorded("t", "g", 0, ((tokens(1), tokens(2)),) * 4001)]
    delays = [
        [turn.delay_s for turn in from_recorded(recorded, ToolDelays(3.0, 0.5), seed)[0].turns]
        for seed in (1, 1, 2)
    ]
    assert delays[0] == delays[1] != delays[2]
    assert np.median(delays[0][:-1]) == pytest.approx(3.0, rel=0.1)
    assert np.std(np.log(delays[0][:-1])) == pytest.approx(0.5, rel=0.1)


def test_a_turn_without_a_response_is_no_request():
    turns = ((tokens(1), tokens()), (tokens(4), tokens(5)))
    (session,) = from_recorded([Recorded("t", "g", 0, turns)], ToolDelays(), seed=1)
    assert len(session.turns) == 1
    with pytest.raises(UserError, match="no turn with both"):
        from_recorded([Recorded("t", "g", 0, turns[:1])], ToolDelays(), seed=1)


@pytest.mark.parametrize(("median", "sigma"), [(0.0, 1.0), (1.0, -1.0)])
def test_tool_times_that_make_no_sense_are_the_users_error(median, sigma):
    with pytest.raises(UserError, match="tool delays"):
        ToolDelays(median, sigma)


def test_prompts_that_grow_are_one_context(tmp_path):
    path = write(
        tmp_path,
        "one",
        entry(0, [1, 2], extra=10, out=20),
        entry(10, [1, 2, 3], extra=0, out=5, api_time=4.0, think_time=2.5),
        entry(20, [1, 2, 3, 4], extra=1, out=7, api_time=3.0),
    )
    (session,) = read(path)
    assert session.name == session.group == "one"
    assert [len(turn.prompt) for turn in session.turns] == [138, 192 - 158, 257 - 197]
    assert [len(turn.output) for turn in session.turns] == [20, 5, 7]
    assert not any(turn.reset for turn in session.turns)
    assert [turn.delay_s for turn in session.turns] == [2.5, 6.0, 0.0]


def test_drawn_tool_times_take_the_place_of_recorded_pauses_and_nothing_elses(tmp_path):
    grown = [entry(at, list(range(at + 1)), extra=30, out=4, think_time=100.0) for at in range(5)]
    path = write(tmp_path, "one", *grown)

    def drawn(seed: int) -> Session:
        return read_coding_sessions(path, 1, seed, Caps(delay_s=0.5), ToolDelays(30.0, 0.1))[0]

    pairs = zip(contexts(read(path)[0]), contexts(drawn(1)), strict=True)
    assert all((one == other).all() for one, other in pairs)
    delays = [[turn.delay_s for turn in drawn(seed).turns] for seed in (1, 1, 2)]
    assert delays[0] == delays[1] != delays[2]
    assert delays[0][-1] == 0.0
    assert min(delays[0][:-1]) > 15.0


def test_a_prompt_that_does_not_go_on_starts_anew_and_shares_what_the_file_says(tmp_path):
    path = write(
        tmp_path,
        "one",
        entry(0, [1, 2], extra=10, out=20),
        entry(1, [1, 5], extra=50, out=20),
        entry(2, [1, 5], extra=60, out=20),  # shorter than the last prompt with its output
    )
    (session,) = read(path)
    assert [turn.reset for turn in session.turns] == [False, True, True]
    first, second, third = contexts(session)
    assert (first[:64] == second[:64]).all()
    assert (first[64:128] != second[64:128]).any()
    assert (second[:128] == third[:128]).all()
    assert (second[128:178] != third[128:178]).any(), "what has no number is nobody else's"


def test_equal_numbers_are_equal_tokens_within_a_file_and_not_across_files(tmp_path):
    for name in ("one", "two"):
        write(tmp_path, name, entry(0, [7, 7, 8], extra=0, out=1))
    one, two = sorted(read(tmp_path, count=2), key=lambda session: session.name)
    prompt = one.turns[0].prompt
    assert prompt.dtype == np.int32
    assert (prompt[:64] == prompt[64:128]).all()
    assert (prompt[:64] != prompt[128:]).any()
    assert (prompt != two.turns[0].prompt).any()


def test_a_session_ends_where_a_cap_is_exceeded(tmp_path):
    grown = [entry(at, list(range(at + 1)), extra=30, out=4, think_time=100.0) for at in range(5)]
    path = write(tmp_path, "one", *grown)
    assert [len(read(path, context=size)[0].turns) for size in (98, 64 * 3 + 34)] == [1, 3]
    session = read(path, turns=2, delay_s=7.0)[0]
    assert [turn.delay_s for turn in session.turns] == [7.0, 0.0]
    with pytest.raises(UserError, match="0 sessions have a request within 97 tokens, 1 are wanted"):
        read(path, context=97)


def test_a_subagents_requests_are_left_out(tmp_path):
    subagent = {"t": 1, "type": "subagent", "requests": [entry(0, [9], 0, 1)]}
    path = write(tmp_path, "one", entry(0, [1], 0, 1), subagent, entry(2, [1, 2], 0, 1))
    assert len(read(path)[0].turns) == 2


def test_the_choice_of_sessions_follows_the_seed(tmp_path):
    for name in "abcdefgh":
        write(tmp_path, name, entry(0, [1], extra=0, out=1))
    chosen = [[each.name for each in read_coding_sessions(tmp_path, 3, seed)] for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]


@pytest.mark.parametrize(
    "changes",
    [{"block_size": 16}, {"requests": 3}, {"requests": [{"in": 64, "out": 1, "hash_ids": [1, 2]}]}],
)
def test_a_file_of_another_kind_is_refused(tmp_path, changes):
    with pytest.raises(UserError, match="not of kv-cache-tester"):
        read(write(tmp_path, "one", **changes))


def test_what_cannot_be_read_is_the_users_error(tmp_path):
    with pytest.raises(UserError, match="in this folder; name the folder"):
        read(tmp_path)
    with pytest.raises(UserError, match="No such file"):
        read(tmp_path / "missing.json.gz")
    plain = tmp_path / "plain.json.gz"
    plain.write_text("{}")
    with pytest.raises(UserError, match="name one of kv-cache-tester's files"):
        read(plain)


def test_a_sample_has_unique_names_and_takes_all_before_it_repeats_one():
    sessions = [Session(name, "g", (SessionTurn(tokens(1), tokens(2)),)) for name in "abcde"]
    few = sample(sessions, 3, seed=1)
    assert few == sample(sessions, 3, seed=1)
    assert len({session.name for session in few}) == 3
    many = sample(sessions, 12, seed=1)
    assert len({session.name for session in many}) == 12
    assert {session.name for session in many[:5]} == set("abcde")
    assert {session.name.split("#")[0] for session in many[5:10]} == set("abcde")
    assert {session.group for session in many} == {"g"}
    assert sample(sessions, 0, seed=1) == []
    with pytest.raises(UserError, match="no session to choose from"):
        sample([], 1, seed=1)


@pytest.mark.skipif(not TRACES.is_dir(), reason="NEMO_WAR_TRACES names no folder")
def test_the_recordings_make_sessions():
    recorded = read_trace(TRACES / "tau_bench_airline.json", lambda text: list(text.encode()[::16]))
    tau = sample(from_recorded(recorded, ToolDelays(), seed=0), 100, seed=0)
    assert len({session.name for session in tau}) == 100
    assert len({session.group for session in tau}) <= 50
    coding = read_coding_sessions(TRACES / "kv_cache_tester", 4, seed=0)
    for session in coding:
        assert max(map(len, contexts(session))) <= Caps().context
        assert min(len(turn.prompt) for turn in session.turns) > 0
