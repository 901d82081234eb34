"""A history on disk: complete, private, or refused."""

from __future__ import annotations

import hashlib
import json
import os
import stat

import numpy as np
import pytest
from pydantic import ValidationError

from nemo_war import checked_file
from nemo_war.config import HistoryConfig
from nemo_war.errors import UserError
from nemo_war.speculative.archive import KIND, Sequence, Sequences, decode, encode, read_archive
from nemo_war.speculative.history import SuffixHistory


@pytest.fixture
def saved(tmp_path):
    history = SuffixHistory(4096, 4)
    for number in range(3):
        slot = history.begin(f"t{number}", "größe", number, np.arange(number, 90, dtype=np.int32))
        history.extend(np.array([slot], np.int32), np.full((1, 1), 7, np.int32), np.ones(1, np.int32))
        history.end(slot)
    path = tmp_path / "replica-0.suffixes"
    history.save(str(path))
    return path


def load(path, **more) -> SuffixHistory:
    history = SuffixHistory(4096, 4)
    history.load(str(path), **{"vocabulary": 100, "epoch": 2, **more})
    return history


def test_what_is_saved_is_loaded(saved):
    sequences = load(saved).export_sequences()
    assert len(set(sequences.trajectories)) == 3
    assert sequences.groups == ("größe",) * 3
    assert sequences.epochs.tolist() == [0, 1, 2]
    assert [len(each.tokens) for each in sequences.rows()] == [91, 90, 89]
    assert [int(each.sampled.sum()) for each in sequences.rows()] == [1, 1, 1]


def test_an_empty_history_is_saved_and_loaded(tmp_path):
    path = tmp_path / "empty"
    SuffixHistory(4096, 4).save(str(path))
    assert load(path).stats().trajectories == 0


def test_only_the_owner_may_read_the_file(saved):
    assert stat.S_IMODE(os.stat(saved).st_mode) == 0o600


def test_bytes_need_no_file():
    tokens, sampled = np.arange(20, dtype=np.int32), np.arange(20) % 3 == 0
    sequences = Sequences.join(
        [Sequence("a", "g", 3, tokens, sampled), Sequence("b", "h", 4, tokens, ~sampled)]
    )
    again = decode(encode(sequences), "of a test")
    assert (again.trajectories, again.groups, again.epochs.tolist()) == (("a", "b"), ("g", "h"), [3, 4])
    assert again.tokens.tolist() == sequences.tokens.tolist()
    assert again.sampled.tolist() == sequences.sampled.tolist()
    with pytest.raises(UserError, match="suffix history of a test: damaged"):
        decode(encode(sequences)[:-1], "of a test")


def test_sequences_are_cut_to_lengths_and_those_not_named_stay_whole():
    tokens, sampled = np.arange(20, dtype=np.int32), np.zeros(20, bool)
    sequences = Sequences.join([Sequence(name, "g", 0, tokens, sampled) for name in "abc"])
    cut = sequences.cut({"a": 5, "c": 99})
    assert [len(each.tokens) for each in cut.rows()] == [5, 20, 20]
    assert [len(each.sampled) for each in cut.rows()] == [5, 20, 20]


def test_any_flipped_byte_is_noticed(saved):
    content = saved.read_bytes()
    for place in range(0, len(content), 7):
        saved.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(UserError) as caught:
            load(saved)
        assert "\n" not in str(caught.value)


def test_a_truncated_file_is_refused(saved):
    content = saved.read_bytes()
    for length in (0, 10, 40, 200, len(content) - 1):
        saved.write_bytes(content[:length])
        with pytest.raises(UserError, match="suffix history"):
            load(saved)


def test_a_foreign_file_is_refused(tmp_path):
    np.save(tmp_path / "foreign.npy", np.arange(5))
    with pytest.raises(UserError, match="not a suffix history"):
        load(tmp_path / "foreign.npy")


def test_a_later_format_is_refused_by_its_number(saved):
    saved.write_bytes(saved.read_bytes().replace(b"history 1\n", b"history 2\n", 1))
    with pytest.raises(UserError, match="format 2, this version reads 1"):
        load(saved)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"absent\.suffixes: no \.suffixes file there"):
        load(tmp_path / "absent.suffixes")


def test_a_folder_of_a_run_stands_for_the_histories_of_its_replicas(saved, tmp_path):
    folder = tmp_path / "run" / "history"
    folder.mkdir(parents=True)
    for number in range(2):
        (folder / f"replica-{number}.suffixes").write_bytes(saved.read_bytes())
    assert load(tmp_path / "run").stats().trajectories == 3, "both replicas have the same trajectories"
    with pytest.raises(UserError, match=r"no \.suffixes file there"):
        load(tmp_path / "absent")


def test_names_of_another_run_do_not_meet_those_of_this_one(saved):
    history = load(saved)
    slot = history.begin("t0", "größe", 2, np.full(5, 50, np.int32))
    assert history.stats().trajectories == 4
    history.end(slot)


def test_a_history_saved_and_loaded_again_and_again_stays_the_same(saved):
    first = load(saved)
    first.save(str(saved))
    assert load(saved).export_sequences().trajectories == first.export_sequences().trajectories


def remember(history: SuffixHistory, name: str, first: int, epoch: int = 0) -> None:
    history.end(history.begin(name, "g", epoch, np.arange(first, first + 40, dtype=np.int32)))


def test_runs_that_name_their_trajectories_alike_may_be_restored_one_from_the_other(tmp_path):
    path = tmp_path / "replica-0.suffixes"
    for first in (0, 20, 40):
        history = load(path) if path.exists() else SuffixHistory(4096, 4)
        remember(history, "t0", first)
        history.save(str(path))
    assert load(path).stats().trajectories == 3


def test_of_several_replicas_the_newest_epochs_are_kept_whatever_file_they_are_in(tmp_path):
    for number, epochs in enumerate(((7, 8), (1, 2))):
        history = SuffixHistory(4096, 4)
        for epoch in epochs:
            text = np.random.default_rng(epoch).integers(0, 99, 100).astype(np.int32)
            history.end(history.begin(f"t{epoch}", "g", epoch, text))
        history.save(str(tmp_path / f"replica-{number}.suffixes"))
    small = SuffixHistory(256, 4)
    small.load(str(tmp_path), vocabulary=100, epoch=8)
    assert small.export_sequences().epochs.tolist() == [7, 8]


def crafted(path, body: bytes) -> None:
    digest = hashlib.blake2b(body).hexdigest().encode()
    path.write_bytes(b"nemo_war suffix history 1\n" + digest + b"\n" + body)


@pytest.mark.parametrize(
    "header",
    [
        {"lengths": 0, "epochs": [], "groups": [], "trajectories": []},
        {"lengths": [[1, 0]], "epochs": [0], "groups": ["g"], "trajectories": ["t"]},
        {"lengths": [2**62] * 4, "epochs": [0] * 4, "groups": ["g"] * 4, "trajectories": list("abcd")},
        {"lengths": [-1, 1], "epochs": [0, 0], "groups": ["g"] * 2, "trajectories": ["a", "b"]},
        {"lengths": [0], "epochs": [-(2**31)], "groups": ["g"], "trajectories": ["t"]},
        {"lengths": [0], "epochs": [2**70], "groups": ["g"], "trajectories": ["t"]},
        {"lengths": [0], "epochs": [0], "groups": [], "trajectories": ["t"]},
        {"lengths": [9], "epochs": [0], "groups": ["g"], "trajectories": ["t"]},
        {"lengths": ["many"], "epochs": [0], "groups": ["g"], "trajectories": ["t"]},
        {"lengths": [0], "epochs": [0], "groups": ["g"], "trajectories": ["\ud800"]},
        {"lengths": [0], "epochs": [0], "groups": ["\udfff"], "trajectories": ["t"]},
        {"lengths": [0], "epochs": [0], "groups": ["g"], "trajectories": ["x" * (1 << 26)]},
        {"epochs": [0]},
        [],
    ],
)
def test_a_header_that_lies_is_refused_though_its_checksum_is_right(tmp_path, header):
    path = tmp_path / "replica-0.suffixes"
    crafted(path, json.dumps(header).encode() + b"\n" + bytes(16))
    with pytest.raises(UserError, match="malformed"):
        load(path)


@pytest.mark.parametrize("length", [2**31, 2**62, 2**63, -1])
def test_bytes_of_a_peer_with_absurd_sizes_are_refused(tmp_path, length):
    header = {"lengths": [length], "epochs": [0], "groups": ["g"], "trajectories": ["t"]}
    content = checked_file.pack(KIND, json.dumps(header).encode() + b"\n" + bytes(5))
    with pytest.raises(UserError, match="of a peer: malformed"):
        decode(content, "of a peer")


def test_a_header_nested_without_end_is_refused(tmp_path):
    path = tmp_path / "replica-0.suffixes"
    crafted(path, b"[" * 100_000 + b"\n")
    with pytest.raises(UserError, match="malformed"):
        load(path)


def test_a_file_larger_than_any_history_is_not_read(tmp_path):
    path = tmp_path / "replica-0.suffixes"
    with path.open("wb") as file:
        file.truncate((1 << 32) + 1)
    with pytest.raises(UserError, match="larger than any"):
        load(path)


def test_what_has_no_end_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "replica-0.suffixes")
    (tmp_path / "replica-1.suffixes").symlink_to("/dev/zero")
    for name in ("replica-0.suffixes", "replica-1.suffixes"):
        with pytest.raises(UserError, match="not a file"):
            read_archive(str(tmp_path / name))
    with pytest.raises(UserError, match="not a file"):
        load(tmp_path)


def test_the_largest_history_that_can_be_configured_can_be_read_again():
    longest = HistoryConfig.model_fields["max_tokens"].metadata[1].le
    assert longest * 4 + longest // 8 < KIND.most_bytes
    with pytest.raises(ValidationError):
        HistoryConfig(max_tokens=longest + 1)


def test_epochs_of_another_run_end_where_this_one_begins(saved):
    assert load(saved, epoch=0).export_sequences().epochs.tolist() == [-2, -1, 0]
    assert load(saved, epoch=7).export_sequences().epochs.tolist() == [5, 6, 7]


def test_tokens_of_another_model_are_refused_and_nothing_is_taken_in(saved):
    history = SuffixHistory(4096, 4)
    with pytest.raises(UserError, match="beyond this model's vocabulary of 80"):
        history.load(str(saved), vocabulary=80)
    assert history.stats().trajectories == 0


def test_a_failed_save_leaves_the_old_file_and_no_rest(saved, monkeypatch):
    before = saved.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        SuffixHistory(4096, 4).save(str(saved))
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]
