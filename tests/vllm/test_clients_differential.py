"""The same request to vLLM and through pdhub: equal, but for the differences that docs/vllm.md names."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from api_answers import differences, normal
from api_cases import Case, cases
from calls import at_once, send

DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"
CASES = {case.name: case for case in cases()}
POOLS = ("pull", "whole")
SERVED = ("/v1/chat/completions", "/v1/completions")

pytestmark = pytest.mark.world("api")


@dataclass(frozen=True)
class Row:
    """One intended difference."""

    requests: tuple[str, ...]
    pool: str
    statuses: tuple[int, int]

    def covers(self, name: str, pool: str) -> bool:
        return fnmatchcase(pool, self.pool) and any(fnmatchcase(name, pattern) for pattern in self.requests)


def rows() -> list[Row]:
    table = DOCS.read_text().split("<!-- differences -->")[1].split("<!-- end -->")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "`" in line]
    return [
        Row(tuple(re.findall(r"`([^`]+)`", requests)), pool.strip("`"), (int(vllm), int(pdhub)))
        for requests, pool, vllm, pdhub, _ in lines
    ]


def intended(name: str, pool: str) -> Row | None:
    found = [row for row in rows() if row.covers(name, pool)]
    assert len(found) < 2, f"{name} via {pool} is in the table twice"
    return found[0] if found else None


def shapes(case: Case) -> list[bool]:
    """Whether it is streamed; both, for most."""
    return [False, True] if case.streams else [bool(case.body.get("stream"))]


def body_of(case: Case, stream: bool) -> bytes:
    if case.raw is not None:
        return case.raw
    alone = {"stream_options"} if case.streams and not stream else set()
    members = {name: value for name, value in case.body.items() if name not in alone}
    return json.dumps({**members, "stream": True} if stream else members).encode()


def compared(world, case: Case) -> list[str]:
    """What is wrong about it."""
    wrong = []
    for stream in shapes(case):
        data = body_of(case, stream)
        direct = send(world.single.url + case.path, data)
        for pool in POOLS:
            routed = send(world.router_url + case.path, data, world.via(pool))
            told = f"{case.name}{' (stream)' if stream else ''} via {pool}"
            wrong += [f"{told}: {line}" for line in judged(case, pool, stream, direct, routed)]
    return wrong


def judged(case: Case, pool: str, stream: bool, direct: tuple[int, str], routed: tuple[int, str]) -> list[str]:
    statuses = (direct[0], routed[0])
    row = intended(case.name, pool)
    if statuses != (row.statuses if row else (direct[0], direct[0])):
        return [f"statuses {statuses} {direct[1][:300]} {routed[1][:300]}"]
    if statuses[0] == statuses[1] == 200:
        return differences(normal(*direct, stream), normal(*routed, stream))
    if routed[0] >= 400 and case.path in SERVED:
        error = json.loads(routed[1])["error"]
        return (
            [] if error["message"] and {"type", "param", "code"} <= error.keys() else [f"no OpenAI error: {routed[1]}"]
        )
    return []


@pytest.mark.parametrize("kind", ["chat", "text", "path"])
def test_answers_are_those_of_vllm(world, full, kind):
    """Of bad requests the selection takes every third; all are in the full run."""
    chosen = [case for case in CASES.values() if case.name.split("-")[0] == kind]
    if not full:
        chosen = [c for i, c in enumerate(chosen) if "bad" not in c.name or i % 3 == 0 or intended(c.name, "whole")]
    wrong = [line for found in at_once(3, lambda case: compared(world, case), chosen) for line in found]
    assert not wrong, "\n".join(wrong)


def test_every_row_of_the_table_is_about_something(world):
    for row in rows():
        for pattern in row.requests:
            assert any(fnmatchcase(name, pattern) for name in CASES), f"no request is called {pattern}"
        assert any(fnmatchcase(pool, row.pool) for pool in POOLS)


def test_what_only_vllm_knows_is_refused_in_its_words(world):
    for name in ("chat-bad-regex-wrong", "text-bad-ids-beyond-vocabulary", "text-bad-suffix"):
        data = body_of(CASES[name], False)
        direct = send(world.single.url + CASES[name].path, data)
        for pool in POOLS:
            assert send(world.router_url + CASES[name].path, data, world.via(pool)) == direct
            assert direct[0] == 400


def test_constrained_answers_are_constrained(world):
    """Equal could also be equally wrong."""
    for pool in POOLS:
        for name, shape in {
            "text-structured-regex": r"[ab]{3}-\d{4}",
            "text-structured-choice": "red|green|blue",
            "text-structured-grammar": "yes|no",
        }.items():
            status, text = send(world.router_url + CASES[name].path, body_of(CASES[name], False), world.via(pool))
            assert status == 200, text
            assert re.fullmatch(shape, json.loads(text)["choices"][0]["text"])
        for name in ("chat-tools-named", "chat-tools-required", "chat-tools-auto-called"):
            status, text = send(world.router_url + CASES[name].path, body_of(CASES[name], False), world.via(pool))
            (call, *_) = json.loads(text)["choices"][0]["message"]["tool_calls"]
            assert "city" in json.loads(call["function"]["arguments"])
