"""The file: safe, strict, and every value knows its line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pdhub.api import ConfigError
from pdhub.config.load import parse, read, scalar


def test_lines_are_remembered() -> None:
    data, origins = parse("a: 1\nb:\n  c:\n    - x\n    - y: 2\n", "f.yaml")
    assert data == {"a": 1, "b": {"c": ["x", {"y": 2}]}}
    assert origins.of(("a",)) == "f.yaml:1"
    assert origins.of(("b", "c", 1, "y")) == "f.yaml:5"
    assert origins.where(("b", "c", 1, "y")) == "b.c[1].y (f.yaml:5)"
    assert origins.where(("b", "absent")) == "b.absent (f.yaml:3)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- a\n", "must hold keys"),
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3: the key 'a' was already given on line 1"),
        ("a:\n  b: 1\n  b: 2\n", "f.yaml:3: the key 'b' was already given on line 2"),
        ("a: {b: 1\n", "f.yaml:"),
        ("a: b: c\n", "f.yaml:1: not valid YAML"),
        ("a: \0", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", "f.yaml:1"),
        ("a: &x [*x]\n", "contains itself"),
        ("? [a]\n: 1\n", "a key must be text"),
    ],
)
def test_bad_files_say_where_what_and_what_to_do(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml")
    assert message in caught.value.message
    assert caught.value.message.startswith("f.yaml")
    assert caught.value.hint


def test_a_missing_file_a_directory_and_bytes(tmp_path: Path) -> None:
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in ((tmp_path / "none.yaml", "no such file"), (tmp_path, "cannot be read"), (binary, "UTF-8")):
        with pytest.raises(ConfigError, match=message) as caught:
            read(path)
        assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"), ("on", "on"), ("true", True), ("12:30:00", "12:30:00"), ("2024-01-01", "2024-01-01"),
        ("007", 7), ("0x1f", 31), ("1e3", 1000.0), (".5", 0.5), ("1_000", "1_000"), ("", None), ("~", None),
        ("[a, 1]", ["a", 1]), ("'1'", "1"), ("-3", -3), ("127.0.0.1", "127.0.0.1"),
    ],
)  # fmt: skip
def test_scalars_are_read_as_people_mean_them(text: str, value: object) -> None:
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


def test_merge_keys_work_and_own_keys_win() -> None:
    data, _ = parse("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3\n", "f")
    assert data["b"] == {"x": 1, "y": 3}


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("abcé\n'\":#- ", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text("xyz", min_size=1, max_size=3), PLAIN, min_size=1, max_size=3))
def test_what_yaml_writes_is_read_back(value: dict[str, object]) -> None:
    assert parse(yaml.safe_dump(value, allow_unicode=True), "f")[0] == value
