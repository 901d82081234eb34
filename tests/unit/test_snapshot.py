"""States on disk: what was written is read, and nothing else is."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from nemo_war import snapshot
from nemo_war.errors import UserError
from nemo_war.snapshot import State

STATE = State(
    {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b/c": np.array(1.5),
        "none": np.zeros((0, 4), np.int64),
    },
    {"names": ("größe", ""), "b/empty": ()},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "replica-0.state"


def same(left: State, right: State) -> bool:
    return (
        dict(left.texts) == dict(right.texts)
        and left.arrays.keys() == right.arrays.keys()
        and all(
            np.array_equal(left.arrays[name], right.arrays[name])
            and left.arrays[name].dtype == right.arrays[name].dtype
            for name in left.arrays
        )
    )


def test_what_was_written_is_read(path: Path) -> None:
    snapshot.write(path, STATE)
    assert same(snapshot.read(path), STATE)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


@given(
    st.dictionaries(
        st.text(max_size=5),
        arrays.arrays(
            st.sampled_from([np.float32, np.float64, np.int64]),
            arrays.array_shapes(min_dims=0, max_dims=3, min_side=0),
            elements={"min_value": 0, "max_value": 1 << 20},
        ),
        max_size=4,
    ),
    st.dictionaries(st.text(max_size=5), st.lists(st.text(max_size=5)).map(tuple), max_size=3),
)
def test_any_state_comes_back(
    tmp_path_factory: pytest.TempPathFactory, of: dict[str, np.ndarray], texts: dict[str, tuple[str, ...]]
) -> None:
    path = tmp_path_factory.mktemp("any") / "x.state"
    snapshot.write(path, State(of, texts))
    assert same(snapshot.read(path), State(of, texts))


def test_parts_that_were_joined_come_apart() -> None:
    joined = State.join({"x": STATE, "y": State({"a": np.zeros(1)})})
    assert same(joined.part("x"), STATE)
    assert joined.part("y").arrays.keys() == {"a"}
    assert same(joined.part("z"), State({}))


@given(st.data())
def test_any_flipped_bit_and_any_cut_are_noticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "x.state"
    snapshot.write(path, STATE)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans(), label="cut"):
        del content[at:]
    else:
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        snapshot.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_version_is_refused_by_its_number(path: Path) -> None:
    snapshot.write(path, STATE)
    path.write_bytes(path.read_bytes().replace(b"state 1\n", b"state 7\n", 1))
    with pytest.raises(UserError, match=r"format 7, this version reads 1; .*or remove the checkpoint"):
        snapshot.read(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"nemo_war suffix history 1\n00\n"])
def test_a_foreign_file_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a WAR state"):
        snapshot.read(path)


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(UserError, match=r"replica-0\.state: No such file"):
        snapshot.read(path)


def test_a_file_larger_than_any_state_is_not_read(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate((1 << 26) + 1)
    with pytest.raises(UserError, match="larger than any"):
        snapshot.read(path)


def crafted(path: Path, header: object, data: bytes = b"") -> None:
    body = json.dumps(header).encode() + b"\n" + data
    path.write_bytes(b"nemo_war WAR state 1\n" + hashlib.blake2b(body).hexdigest().encode() + b"\n" + body)


@pytest.mark.parametrize(
    ("arrays", "data"),
    [
        ([["a", "|O", [1]]], bytes(8)),
        ([["a", "<f8", [2]]], bytes(8)),
        ([["a", "<f8", [1 << 62, 4]]], bytes(8)),
        ([["a", "<f8", [-1]]], bytes(8)),
        ([["a", "<f8", [True]]], bytes(8)),
        ([["a", "<f8", [1.0]]], bytes(8)),
        ([["a", "<f8", [1] * 99]], bytes(8)),
        ([["a", "<f8", 1]], bytes(8)),
        ([["a", ["<f8"], [1]]], bytes(8)),
        ([["a", "<f8", []]], bytes(16)),
        ([["a", "<f8", []]], np.array(np.nan).tobytes()),
        ([["a", "<f4", []]], np.array(np.inf, np.float32).tobytes()),
        ([["a", "<f8", []]], np.array(-1.0).tobytes()),
        ([["a", "<i8", []]], np.array(-1).tobytes()),
        ([["a", "<f8"]], bytes(8)),
        (7, b""),
        (None, b""),
    ],
)
def test_a_header_that_lies_is_refused_though_its_checksum_is_right(
    path: Path, arrays: object, data: bytes
) -> None:
    crafted(path, {"arrays": arrays, "texts": {}}, data)
    with pytest.raises(UserError, match="malformed"):
        snapshot.read(path)


@pytest.mark.parametrize(
    "header",
    [
        [],
        {},
        {"arrays": []},
        {"arrays": [], "texts": []},
        {"arrays": [], "texts": {"a": [1]}},
        {"arrays": [], "texts": {"a": 1}},
        {"arrays": [], "texts": {"a": ["x" * (1 << 23)]}},
    ],
)
def test_texts_that_are_none_are_refused(path: Path, header: object) -> None:
    crafted(path, header)
    with pytest.raises(UserError, match="malformed"):
        snapshot.read(path)


def test_a_header_nested_without_end_is_refused(path: Path) -> None:
    body = b"[" * 100_000 + b"\n"
    path.write_bytes(b"nemo_war WAR state 1\n" + hashlib.blake2b(body).hexdigest().encode() + b"\n" + body)
    with pytest.raises(UserError, match="malformed"):
        snapshot.read(path)


@pytest.mark.parametrize(
    ("name", "like", "most", "says"),
    [
        ("x", np.zeros(1), 9, "x is missing"),
        ("a", np.zeros((2, 3)), 9, "a is float32[2, 3], not float64[2, 3]"),
        ("a", np.zeros((3, 2), np.float32), 9, "a is float32[2, 3], not float32[3, 2]"),
        ("a", np.zeros((2, 3), np.float32), 4, "a has a number above 4"),
    ],
)
def test_an_array_is_of_the_shape_that_is_wanted(name: str, like: np.ndarray, most: float, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        STATE.array(name, like, most)


def test_other_arrays_are_not_written(path: Path) -> None:
    with pytest.raises(TypeError, match="no arrays of"):
        snapshot.write(path, State({"a": np.zeros(1, np.complex128)}))
    assert not path.exists()


def test_a_failed_write_leaves_the_old_file_and_no_rest(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot.write(path, STATE)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="disk full"):
                snapshot.write(path, State({}))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
