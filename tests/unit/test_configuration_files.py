"""Configuration files: inheritance, interpolation, and what is wrong with a file."""

from pathlib import Path

import pytest

from nemo_war.configuration import load
from nemo_war.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_child_wins_over_its_parents_and_a_later_parent_over_an_earlier(tmp_path: Path):
    write(tmp_path / "root.yaml", "a: {x: 1, y: 1, z: 1}\nb: 1")
    write(tmp_path / "first.yaml", "defaults: root.yaml\na: {x: 2, y: 2}")
    write(tmp_path / "second.yaml", "a: {y: 3}")
    child = write(tmp_path / "child.yaml", "defaults: [first.yaml, second.yaml]\nb: 4")
    assert load(child) == {"a": {"x": 2, "y": 3, "z": 1}, "b": 4}


def test_parents_are_found_beside_the_file_that_names_them(tmp_path: Path):
    (tmp_path / "base").mkdir()
    write(tmp_path / "base/root.yaml", "a: 1")
    write(tmp_path / "base/parent.yaml", "defaults: root.yaml")
    assert load(write(tmp_path / "child.yaml", "defaults: base/parent.yaml")) == {"a": 1}


def test_a_file_inherited_on_two_ways_is_no_cycle(tmp_path: Path):
    write(tmp_path / "root.yaml", "a: 1")
    for name in ("left", "right"):
        write(tmp_path / f"{name}.yaml", "defaults: root.yaml")
    assert load(write(tmp_path / "child.yaml", "defaults: [left.yaml, right.yaml]")) == {"a": 1}


def test_a_block_with_the_override_marker_replaces_the_inherited_one(tmp_path: Path):
    write(tmp_path / "parent.yaml", "a: {x: 1, y: 1}\nb: {x: 1}")
    child = write(tmp_path / "child.yaml", "defaults: parent.yaml\na: {_override_: true, y: 2}\nb: {y: 2}")
    assert load(child) == {"a": {"y": 2}, "b": {"x": 1, "y": 2}}


def test_interpolations_see_the_overrides_and_know_nemo_rls_resolvers(tmp_path: Path):
    text = "a: 2\nb: ${a}\nc: ${mul:${a}, ${b}}\nd: ${add:${c},1}\ne: ${max:${d},3}\nf: ${div:${c},2}"
    loaded = load(write(tmp_path / "x.yaml", text), ["a=4"])
    assert loaded == {"a": 4, "b": 4, "c": 16, "d": 17, "e": 17, "f": 8.0}


def test_a_mandatory_value_may_come_from_an_override(tmp_path: Path):
    assert load(write(tmp_path / "x.yaml", "a:\n  b: ???"), ["a.b=1e-6"]) == {"a": {"b": 1e-6}}


def test_a_plus_plus_override_adds_keys_below_a_block_that_is_null(tmp_path: Path):
    assert load(write(tmp_path / "x.yaml", "a: null"), ["++a.b.c=[1,x]"]) == {"a": {"b": {"c": [1, "x"]}}}


def test_the_last_of_two_overrides_wins(tmp_path: Path):
    assert load(write(tmp_path / "x.yaml", "a: 1"), ["a=2", "a=3"]) == {"a": 3}


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("a: 1\nb: c: 2", "config", ["x.yaml:2", "mapping values", "line 2, column 5"]),
        ("a: 1\na: 2", "config", ["x.yaml:2", "duplicate key a"]),
        ("- 1\n- 2", "config", ["x.yaml", "a mapping, not a list"]),
        ("3", "config", ["x.yaml", "a readable UTF-8 YAML file with a mapping"]),
        ("a: '${mul:'", "a", ["x.yaml", "valid keys and ${...}"]),
        ("defaults: none.yaml", "defaults", ["'none.yaml'", "relative to", "x.yaml"]),
        ("defaults: 3", "defaults", ["3", "a path or a list of paths"]),
        ("defaults: [{a: b}]", "defaults", ["{'a': 'b'}", "a path or a list of paths"]),
        ("defaults: x.yaml", "defaults", ["x.yaml -> x.yaml", "without a cycle"]),
        ("defaults: sub/../x.yaml", "defaults", ["x.yaml -> x.yaml", "without a cycle"]),
        ("a: {b: '${c}'}\nc: [1, '${a.d}']", "a.b[1]", ["${a.d}", "'a.d' not found", "${a.b}"]),
        ("a: {b: '${c}'}\nc: {d: '${a}'}", "a", ["do not contain themselves"]),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, text: str, key: str, says: list[str]):
    (tmp_path / "sub").mkdir()
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path / "x.yaml", text))
    assert caught.value.key == key
    assert "\n" not in str(caught.value)
    assert "allowed: " in str(caught.value)
    assert [part for part in says if part not in str(caught.value)] == []


def test_a_cycle_over_several_files_is_named(tmp_path: Path):
    write(tmp_path / "a.yaml", "defaults: b.yaml")
    write(tmp_path / "b.yaml", "defaults: a.yaml")
    with pytest.raises(ConfigError, match=r"a\.yaml -> b\.yaml -> a\.yaml"):
        load(tmp_path / "a.yaml")


def test_a_file_that_is_not_there_or_not_text_is_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^config='.*nope\.yaml': allowed: a YAML file that exists; give"):
        load(tmp_path / "nope.yaml")
    with pytest.raises(ConfigError, match="a YAML file that exists"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(tmp_path / "latin.yaml")
