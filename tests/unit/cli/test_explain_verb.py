"""`pdhub explain`: where a request would go, and why, without a fleet."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from pdhub.cli import main

ROOT = Path(__file__).parents[3]

CONFIG = """\
model: {name: m, aliases: [other]}
pools:
  - name: fast
    cost: 4
    engine: {type: openai, config: {slots: 1, max_context: 4000, features: [sampling, seed]}}
    nodes: [{name: fast-0, port: 9001, launch: false}, {name: fast-1, port: 9003, launch: false}]
    latency: {ttft_ms: 50, tpot_ms: 5, output_tokens: 100}
  - name: general
    cost: 1
    engine: {type: openai, config: {slots: 8}}
    nodes: [{name: general-0, port: 9002, launch: false, labels: {zone: a}}]
    latency: {ttft_ms: 100, tpot_ms: 30, output_tokens: 100}
policy:
  type: slo
  slo_classes: {quick: {tpot_ms: 10}}
  tenants:
    guest: {trust: strip}
  rules:
    - {name: night, match: {time: [{start: "22:00", end: "06:00"}], priority: {below: 0}}, pools: [fast], fallback: []}
  shadow: {type: round_robin}
"""

BODY = {"model": "m", "prompt": "hello", "max_tokens": 16, "temperature": 0}

Explain = Callable[..., dict[str, Any]]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def verb(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def verb(*words: str, body: Any = BODY) -> tuple[int, str, str]:
        request = tmp_path / "r.json"
        request.write_bytes(body if isinstance(body, bytes) else json.dumps(body).encode())
        with pytest.raises(SystemExit) as exit_:
            main(["explain", str(config), "--request", str(request), *words])
        out, err = capsys.readouterr()
        return int(exit_.value.code or 0), out, err

    return verb


@pytest.fixture
def explain(verb: Callable[..., tuple[int, str, str]]) -> Explain:
    def explain(*words: str, body: Any = BODY) -> dict[str, Any]:
        code, out, err = verb("--json", *words, body=body)
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    return explain


def test_targets_choose_the_pool(explain: Explain) -> None:
    tight = explain("-H", "x-slo-tpot-ms: 10")
    assert (tight["pool"], tight["reason"]) == ("fast", "slo-met")
    assert tight["node"] in ("fast-0", "fast-1")
    assert tight["request"]["slo"] == {"ttft_ms": None, "tpot_ms": 10.0, "slo_class": None, "source": "header"}
    loose = explain("-H", "x-slo-tpot-ms: 50")
    assert (loose["pool"], loose["node"], loose["reason"]) == ("general", "general-0", "slo-met")
    none = explain()
    assert (none["pool"], none["reason"]) == ("general", "no-slo")


def test_every_node_is_there_once_with_its_prediction(explain: Explain) -> None:
    found = explain("-H", "x-slo-tpot-ms: 10")
    assert [(c["pool"], c["node"]) for c in found["candidates"]] == [
        ("fast", "fast-0"), ("fast", "fast-1"), ("general", "general-0"),
    ]  # fmt: skip
    assert found["candidates"][2]["predicted"]["tpot_ms"] == 30.0
    assert len(found["order"]) == 3
    assert found["assumed"]


def test_the_same_question_has_the_same_answer(explain: Explain) -> None:
    assert explain("-H", "x-slo-tpot-ms: 10") == explain("-H", "x-slo-tpot-ms: 10")


def test_ties_go_by_the_id(explain: Explain) -> None:
    nodes = {explain("-H", "x-slo-tpot-ms: 10", "-H", f"x-request-id: r{n}")["node"] for n in range(16)}
    assert nodes == {"fast-0", "fast-1"}


def test_classes_tenants_and_the_shadow(explain: Explain) -> None:
    found = explain("-H", "X-Pdhub-Slo-Class: quick")
    assert (found["pool"], found["request"]["slo"]["slo_class"]) == ("fast", "quick")
    assert found["shadow"]["policy"] == "round_robin"
    guest = explain("-H", "x-slo-tpot-ms: 10", "-H", "x-llm-d-inference-fairness-id: guest")
    assert (guest["pool"], guest["trust"], guest["request"]["tenant"]) == ("general", "strip", "guest")


def test_what_cannot_be_read_is_named(explain: Explain) -> None:
    found = explain("-H", "x-slo-tpot-ms: soon")
    assert (found["reason"], found["invalid"]) == ("no-slo", ["x-slo-tpot-ms"])


def test_capabilities_come_from_what_engines_declare(explain: Explain) -> None:
    found = explain("-H", "x-slo-tpot-ms: 10", body={**BODY, "n": 2})
    assert found["pool"] == "general"
    assert {c["dropped_by"] for c in found["candidates"] if c["pool"] == "fast"} == {"capability"}
    long = explain("-H", "x-slo-tpot-ms: 10", body={**BODY, "max_tokens": 5000})
    assert {c["dropped_by"] for c in long["candidates"] if c["pool"] == "fast"} == {"context"}


def test_nodes_in_other_states(explain: Explain) -> None:
    tight = ("-H", "x-slo-tpot-ms: 10")
    assert explain(*tight, "--node", "fast-0=down")["node"] == "fast-1"
    assert explain(*tight, "--node", "fast-1=3")["node"] == "fast-0"
    gone = explain(*tight, "--node", "fast-0=down", "--node", "fast-1=draining", "--node", "general-0=open")
    assert (gone["pool"], gone["node"], gone["reason"]) == (None, None, "no-healthy-node")
    assert [c["why"] for c in gone["candidates"]] == ["is down", "is draining", "is open"]


def test_time_windows(explain: Explain) -> None:
    flex = {**BODY, "priority": 5}
    night = explain("--at", "2026-01-05T23:00+00:00", body=flex)
    assert (night["pool"], night["rule"]) == ("fast", "night")
    assert explain("--at", "2026-01-05T12:00+00:00", body=flex)["rule"] is None


def test_a_chat_is_seen_by_its_messages(explain: Explain) -> None:
    chat = {"model": "other", "messages": [{"role": "user", "content": 'say "prompt"'}]}
    assert explain(body=chat)["request"]["endpoint"] == "/v1/chat/completions"
    assert explain(body={**BODY, "prompt": 'say "messages"'})["request"]["endpoint"] == "/v1/completions"


def test_for_people(verb: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = verb("-H", "x-slo-tpot-ms: 10", "--node", "fast-0=down")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("fast / fast-1    slo-met")
    assert any("TPOT 10 ms (from header)" in line for line in lines)
    assert any(line.startswith(" –   fast") and "health: is down" in line for line in lines)
    assert any(line.startswith("assumed: ") for line in lines)


@pytest.mark.parametrize(
    ("words", "body", "code", "said"),
    [
        ((), {**BODY, "model": "x"}, 1, "`x` does not exist"),
        ((), b"{", 1, "not valid JSON"),
        ((), b"[1]", 1, "must be a JSON object"),
        (("-H", "no colon"), BODY, 2, "is no header"),
        (("--node", "fast0=down"), BODY, 2, "did you mean 'fast-0'?"),
        (("--node", "fast-0=sleepy"), BODY, 2, "is no state of a node"),
        (("--at", "noon"), BODY, 2, "is no moment"),
        (("--set", "policy.strict=true", "-H", "x-slo-tpot-ms: x"), BODY, 1, "x-slo-tpot-ms cannot be read"),
    ],
)
def test_questions_that_have_no_answer(
    verb: Callable[..., tuple[int, str, str]], words: tuple[str, ...], body: Any, code: int, said: str
) -> None:
    found, out, err = verb(*words, body=body)
    assert (found, out) == (code, "")
    assert said in err
    assert "Traceback" not in err


def test_a_missing_file(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["explain", str(config), "--request", "/nowhere.json"])
    assert exit_.value.code == 2
    assert "cannot be read" in capsys.readouterr().err


def test_standard_input(config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(json.dumps(BODY).encode())))
    with pytest.raises(SystemExit):
        main(["explain", str(config), "--request", "-", "--json"])
    assert json.loads(capsys.readouterr().out)["pool"] == "general"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_can_be_explained(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pdhub.config.build import load_plan

    request = tmp_path / "r.json"
    request.write_text(json.dumps({**BODY, "model": load_plan(path).config.model.name}))
    with pytest.raises(SystemExit) as exit_:
        main(["explain", str(path), "--request", str(request), "-H", "x-slo-tpot-ms: 10", "--json"])
    assert not exit_.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["pool"]
    assert not any("declares nothing" in text for text in found["assumed"])


def test_the_hand_over_is_part_of_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = tmp_path / "r.json"
    request.write_text(json.dumps({**BODY, "model": "smollm2"}))
    words = ["explain", str(ROOT / "configs" / "quickstart.yaml"), "--request", str(request)]
    with pytest.raises(SystemExit):
        main([*words, "--json"])
    told = json.loads(capsys.readouterr().out)
    line = {"tokens_ahead": 0, "wait_ms": None}
    assert told["handoff"] == {"bind": "early", "prefill": "prefill-0", "reason": "least-loaded", **line}
    with pytest.raises(SystemExit):
        main([*words, "--node", "prefill-0=down"])
    assert "prefill   nobody    no-healthy-node" in capsys.readouterr().out
