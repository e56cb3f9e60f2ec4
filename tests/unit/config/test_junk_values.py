"""Whatever stands in the file: a plan, or an error of ours; never a traceback of something else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdhub.api import PDHubError
from pdhub.config.build import build_plan, parse_config
from pdhub.config.load import parse

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70_000)
    | st.floats(allow_nan=True)
    | st.sampled_from(["", "demo", "fast", "x" * 200, "-1", "..", "ü", "127.0.0.1"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["name", "type", "config", "nodes", "port", "slots"]), inner, max_size=3)
    ),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path below ``value``."""
    found = [path] if path else []
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        found += places(member, (*path, key))
    return found


def attempt(action: Callable[[], object]) -> PDHubError | None:
    """The error of ours that ``action`` ends with, if one; any other fails the test."""
    try:
        action()
    except PDHubError as error:
        return error
    return None


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_junk_value_anywhere_is_a_clear_error(data: st.DataObject, base: str, registry: Any) -> None:
    document = copy.deepcopy(parse(base, "c.yaml")[0])
    path = data.draw(st.sampled_from(places(document)))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = data.draw(JUNK)
    read, origins = parse(yaml.safe_dump(document), "c.yaml")
    error = attempt(lambda: build_plan(parse_config(read, origins), registry, origins=origins))
    assert error is None or (error.message and error.hint)


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet=st.sampled_from("ab:-[]{}#&*!|>'\"%@` \n\t\0é1"), max_size=40))
def test_junk_text_is_a_clear_error(text: str) -> None:
    error = attempt(lambda: parse(text, "c.yaml"))
    assert error is None or (error.message.startswith("c.yaml") and error.hint)


@pytest.mark.parametrize("key", ["1", "true", "~"])
def test_keys_are_text(key: str) -> None:
    assert parse(f"{key}: x\n", "c.yaml")[0] == {key: "x"}
