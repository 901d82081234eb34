import contextlib
import json
import math
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records_builder import fixed_work, one_step

from nemo_war import __version__
from nemo_war.errors import UserError
from nemo_war.telemetry import log
from nemo_war.telemetry.log import EventLog, encode, read
from nemo_war.telemetry.records import Pass, Record, ReplicaRecord, StepRecord

RUN = Pass("war", "fixed", 1)
STEP = one_step(RUN, 0, 6.0)

# What JSON and the reader promise to carry: 64-bit counts, finite floats, any text of bounded length.
TEXT = st.text(alphabet=st.characters(), max_size=40)
REALS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = {
    int: st.integers(min_value=-(2**63) + 1, max_value=2**63 - 1),
    float: REALS,
    str: TEXT,
    bool: st.booleans(),
    str | None: st.none() | TEXT,
    int | None: st.none() | st.integers(min_value=-(2**63) + 1, max_value=2**63 - 1),
    float | None: st.none() | REALS,
}


def built(kind: type) -> st.SearchStrategy:
    hints = get_type_hints(kind)
    return st.builds(
        kind, **{n: VALUES[hint] if hint in VALUES else built(hint) for n, hint in hints.items()}
    )


any_record = st.one_of(*(built(kind) for kind in get_args(Record)))


def written(folder: Path, records: list[Record]) -> Path:
    with EventLog(folder / log.FILE_NAME) as events:
        for record in records:
            events.append(record)
    return events.path


def with_bytes(path: Path, extra: bytes) -> Path:
    with path.open("ab") as file:
        file.write(extra)
    return path


@settings(max_examples=60, deadline=None)
@given(st.lists(any_record, max_size=5))
def test_what_is_appended_is_what_is_read(records):
    with tempfile.TemporaryDirectory() as folder:
        stream = read(written(Path(folder), records))
    assert stream.records == tuple(records)
    assert stream.damage == ()


def test_the_first_line_says_who_wrote_the_log_and_when(tmp_path):
    path = written(tmp_path, STEP)
    first = json.loads(path.read_text().splitlines()[0])
    assert first["kind"] == "Header"
    assert (first["schema"], first["nemo_war"]) == (1, __version__)
    assert read(path).header.started == first["started"]


def test_a_record_is_one_flat_line_that_names_its_kind_and_its_pass(tmp_path):
    second = json.loads(written(tmp_path, STEP).read_text().splitlines()[1])
    assert second["kind"] == "TurnRecord"
    assert second["run"] == {"mode": "war", "phase": "fixed", "repeat": 1}


def test_only_the_owner_can_read_the_log(tmp_path):
    assert stat.S_IMODE(os.stat(written(tmp_path, STEP)).st_mode) == 0o600


def test_a_second_run_cannot_write_into_the_log_of_a_first(tmp_path):
    path = written(tmp_path, STEP)
    with pytest.raises(UserError, match="a log holds one run"):
        EventLog(path)


def test_a_closed_log_refuses_records_and_may_be_closed_again(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as events:
        pass
    events.close()
    with pytest.raises(ValueError, match="closed"):
        events.append(STEP[0])


def test_a_killed_process_loses_no_record_it_had_appended(tmp_path):
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from records_builder import fixed_work
from nemo_war.telemetry.log import EventLog
events = EventLog(Path({str(tmp_path / "events.jsonl")!r}))
for record in fixed_work():
    events.append(record)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], check=False, timeout=30)
    assert read(tmp_path / "events.jsonl").records == tuple(fixed_work())


def test_records_of_several_threads_do_not_mix_within_a_line(tmp_path):
    records = fixed_work(repeats=1)
    with EventLog(tmp_path / "events.jsonl") as events:
        threads = [threading.Thread(target=lambda: [events.append(r) for r in records]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    stream = read(events.path)
    assert stream.damage == ()
    assert len(stream.records) == 4 * len(records)


def test_counters_from_compiled_kernels_are_written_as_plain_numbers(tmp_path):
    path = written(tmp_path, [ReplicaRecord(RUN, 0, 0, drafts=np.int64(7), draft_seconds=np.float32(0.5))])
    assert read(path).records == (ReplicaRecord(RUN, 0, 0, drafts=7, draft_seconds=0.5),)


def test_a_loss_that_is_not_a_number_is_kept(tmp_path):
    step = next(record for record in STEP if isinstance(record, StepRecord))
    path = written(tmp_path, [replace(step, loss=math.nan, grad_norm=math.inf)])
    (read_back,) = read(path).records
    assert math.isnan(read_back.loss)
    assert read_back.grad_norm == math.inf


def test_a_giant_error_text_is_cut_so_that_its_line_can_be_read_back(tmp_path):
    path = written(tmp_path, [replace(STEP[0], error="\U0001f4a5" * 1_000_000)])
    (read_back,) = read(path).records
    assert len(read_back.error) == log.MAX_TEXT


def test_a_line_cut_by_a_crash_costs_only_itself(tmp_path):
    path = with_bytes(written(tmp_path, STEP), encode(STEP[0])[:50])
    stream = read(path)
    assert stream.records == tuple(STEP)
    assert stream.damage == (f"line {len(STEP) + 2}: cut off: the run was stopped while writing it",)


def test_a_last_line_that_lacks_only_its_newline_counts(tmp_path):
    path = with_bytes(written(tmp_path, STEP), encode(STEP[0])[:-1])
    assert read(path).records == (*STEP, STEP[0])


def test_kinds_and_fields_of_newer_versions_are_skipped_and_counted(tmp_path):
    newer = json.loads(encode(STEP[0])) | {"field_of_tomorrow": [1, 2]}
    lines = [json.dumps({"kind": "RecordOfTomorrow", "bytes": 5})] * 3 + [json.dumps(newer)]
    stream = read(with_bytes(written(tmp_path, STEP), "\n".join(lines).encode()))
    assert stream.records == (*STEP, STEP[0])
    assert stream.damage == ("3 records of unknown kinds skipped (newer version?): 'RecordOfTomorrow'",)


def test_a_newer_schema_is_said_with_what_to_do(tmp_path):
    header = b'{"kind": "Header", "schema": 2, "nemo_war": "9", "started": "2030"}\n'
    path = with_bytes(tmp_path / "events.jsonl", header + encode(STEP[0]))
    assert read(path).damage == ("written with schema 2, this version knows 1: upgrade nemo-war",)


def test_fields_that_a_record_lacks_take_their_defaults_when_they_have_one(tmp_path):
    older = {key: value for key, value in json.loads(encode(STEP[0])).items() if key != "error"}
    path = with_bytes(written(tmp_path, []), json.dumps(older).encode())
    assert read(path).records == (STEP[0],)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"\x00\xff\xfe garbage", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b'"text"', "not a record"),
        (b'{"kind": 5}', "not a record"),
        (b'{"kind": "StepRecord"}', "StepRecord lacks run"),
        (b'{"kind": "RefitRecord", "run": "war"}', "Pass is 'war', not an object"),
        (encode(STEP[0]).strip().replace(b'"turn": 0', b'"turn": true'), "TurnRecord.turn is True"),
        (encode(STEP[0]).strip().replace(b'"turn": 0', b'"turn": 1' + b"0" * 100), "TurnRecord.turn is 1000"),
        (encode(STEP[0]).strip().replace(b'"turn": 0', b'"turn": null'), "TurnRecord.turn is None"),
        (b'{"kind": "\\u001b[31m', "not JSON"),
        (b"x" * (log.MAX_LINE_BYTES * 2 + 5), "longer than"),
    ],
)
def test_a_damaged_line_is_named_and_the_others_are_kept(tmp_path, line, reason):
    path = with_bytes(written(tmp_path, STEP), line + b"\n" + encode(STEP[-1]))
    stream = read(path)
    assert stream.records == (*STEP, STEP[-1])
    assert len(stream.damage) == 1
    assert stream.damage[0].startswith(f"line {len(STEP) + 2}: {reason}")


def test_much_garbage_is_counted_instead_of_listed(tmp_path):
    stream = read(with_bytes(written(tmp_path, STEP), b"garbage\n" * 1_000))
    assert stream.records == tuple(STEP)
    assert len(stream.damage) == log.MAX_LISTED + 1
    assert stream.damage[-1] == f"{1_000 - log.MAX_LISTED} more damaged lines"


def test_a_file_that_is_all_garbage_gives_no_records_but_says_so(tmp_path):
    stream = read(with_bytes(tmp_path / "events.jsonl", os.urandom(10_000)))
    assert stream.records == ()
    assert "the header is missing: the version that wrote this log is unknown" in stream.damage


def test_a_missing_log_is_an_error_that_says_what_to_name(tmp_path):
    with pytest.raises(UserError, match=r"no event log at .*name the folder of a run"):
        read(tmp_path / "events.jsonl")


def test_an_empty_log_is_an_error_that_says_what_to_do(tmp_path):
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(UserError, match=r"is empty.*run it again"):
        read(tmp_path / "events.jsonl")


@contextlib.contextmanager
def room(size: int) -> Iterator[None]:
    """No file may become larger: writes fail as on a full disk, part of them done."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


def test_a_full_disk_costs_records_and_is_on_record_once_there_is_room(tmp_path: Path) -> None:
    events, record = EventLog(tmp_path / log.FILE_NAME), STEP[0]
    events.append(record)
    whole = events.path.stat().st_size
    with room(whole + 10):
        for _ in range(3):
            events.append(record)
        assert events.path.stat().st_size == whole
    events.append(record)
    events.close()
    stream = read(events.path)
    assert (events.lost, stream.records) == (3, (record, record))
    assert stream.damage == ("line 3: 3 records could not be written here: the disk was full",)


def test_what_was_lost_at_the_end_is_on_record_where_its_count_has_room(tmp_path: Path) -> None:
    events = EventLog(tmp_path / log.FILE_NAME)
    with room(events.path.stat().st_size):
        for record in STEP[:3]:
            events.append(record)
    events.close()
    events.close()
    stream = read(events.path)
    assert stream.records == ()
    assert stream.damage == ("line 2: 3 records could not be written here: the disk was full",)


def test_a_log_that_has_no_room_from_the_start_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    with room(10), pytest.raises(UserError, match="the disk is full; choose another folder"):
        EventLog(tmp_path / log.FILE_NAME)
    assert not list(tmp_path.iterdir())
