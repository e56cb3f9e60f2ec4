"""Decisions as data: documents, what is kept, what is written, and what a broken disk does (nothing)."""

from __future__ import annotations

import json
import logging
import math
import threading
from pathlib import Path

import pytest

from pdhub.api import SLO, Candidate, Decision, Prediction, Reason, RequestRecord, RequestView
from pdhub.api.errors import ConfigError
from pdhub.policies.candidates import Candidates
from pdhub.telemetry.decisions import DecisionFile, DecisionLog, Entry, decision_document, to_logger


def view(id: str = "r") -> RequestView:
    return RequestView(
        id=id,
        model="m",
        endpoint="/v1/completions",
        prompt_tokens=7,
        slo=SLO(tpot_ms=10.0, source="header"),
        headers={"x-beta": "a secret"},
        session="a conversation",
        prefix=(1, 2),
    )


def decision() -> Decision:
    return Decision(
        order=(("fast", "fast-0"),),
        candidates=(
            Candidate("fast", "fast-0", scores={"a": 0.25, "b": math.nan}, predicted=Prediction(10.0, math.inf, None)),
            Candidate("slow", "slow-0", dropped_by="health", why="is down"),
        ),
        reason=Reason.SLO_MET,
        policy="slo",
        rule="night",
    )


def record(id: str = "r") -> RequestRecord:
    return RequestRecord(id, "m", "fast", "fast-0", None, "slo-met", "ok", ttft_ms=12.0, predicted_ttft_ms=10.0)


def test_a_decision_is_a_document_that_any_json_reader_takes() -> None:
    document = json.loads(json.dumps(Entry(view(), decision(), "v1").document(), allow_nan=False))
    assert (document["pool"], document["node"], document["reason"]) == ("fast", "fast-0", "slo-met")
    assert (document["policy"], document["rule"], document["version"]) == ("slo", "night", "v1")
    assert document["order"] == [["fast", "fast-0"]]
    kept, dropped = document["candidates"]
    assert kept["kept"]
    assert kept["scores"] == {"a": 0.25, "b": None}
    assert kept["predicted"] == {"ttft_ms": 10.0, "tpot_ms": None, "wait_ms": None, "turn_ms": 0.0}
    assert (dropped["kept"], dropped["dropped_by"], dropped["why"]) == (False, "health", "is down")
    assert document["outcome"] is None


def test_nothing_a_client_wrote_is_in_it() -> None:
    text = json.dumps(Entry(view(), decision(), "v1").document())
    assert "secret" not in text
    assert "conversation" not in text


def test_nobody_is_a_decision_too() -> None:
    document = decision_document(Decision((), (), Reason.NO_HEALTHY_NODE, "slo"))
    assert (document["pool"], document["node"], document["order"]) == (None, None, [])


def test_the_latest_decisions_are_kept_and_follow_their_request() -> None:
    log = DecisionLog(keep=3)
    entries = [log.note(None, view(str(n)), decision(), "v1") for n in range(5)]
    assert [entry.id for entry in log.recent()] == ["4", "3", "2"]
    last = entries[-1]
    assert last is not None
    again = log.note(last, view("4"), Decision((), (), Reason.SHED, "slo"), "v1")
    assert again is last
    log.ended(last, record("4"))
    newest = next(iter(log.recent())).document()
    assert (newest["reason"], newest["looks"], newest["outcome"]["ttft_ms"]) == ("shed", 2, 12.0)


def test_nothing_is_made_when_nobody_looks() -> None:
    log = DecisionLog()
    assert log.note(None, view(), decision(), "v1") is None


def test_a_sample_goes_by_the_id_and_has_its_share(tmp_path: Path) -> None:
    written: list[str] = []
    log = DecisionLog(sample=0.25, write=lambda entry: written.append(entry.id))
    for n in range(2000):
        if (entry := log.note(None, view(f"id-{n}"), decision(), "v1")) is not None:
            log.ended(entry, record(f"id-{n}"))
    log.close()
    log.close()
    assert 400 < len(written) + log.dropped < 600
    other = DecisionLog(sample=0.25, write=lambda entry: None)
    assert all(other.note(None, view(id), decision(), "v1") is not None for id in written)
    other.close()


def test_a_slow_writer_costs_lines_and_no_request() -> None:
    go = threading.Event()

    def slow(entry: Entry) -> None:
        go.wait(5)

    log = DecisionLog(sample=1.0, write=slow)
    for n in range(2000):
        entry = log.note(None, view(str(n)), decision(), "v1")
        assert entry is not None
        log.ended(entry, record(str(n)))
    assert log.dropped >= 2000 - 1024 - 1
    go.set()
    log.close()


def test_lines_of_a_file_and_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    entry = Entry(view(), decision(), "v1", record=record())
    size = len(json.dumps(entry.document(), separators=(",", ":"))) + 1
    write = DecisionFile(path, limit_bytes=3 * size)
    for _ in range(8):
        write(entry)
    lines = path.read_text().splitlines()
    assert len(lines) == 2
    assert len((tmp_path / "decisions.jsonl.1").read_text().splitlines()) == 3
    assert json.loads(lines[0])["outcome"]["outcome"] == "ok"


def test_a_file_that_cannot_be_written_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written") as found:
        DecisionFile(tmp_path / "nowhere" / "d.jsonl", 1000)
    assert found.value.hint


def test_a_disk_that_fails_later_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "d" / "d.jsonl"
    path.parent.mkdir()
    write = DecisionFile(path, 10_000)
    path.unlink()
    path.parent.rmdir()
    entry = Entry(view(), decision(), "v1")
    with caplog.at_level(logging.ERROR, "pdhub.decisions"):
        write(entry)
        write(entry)
        assert len(caplog.records) == 1
        path.parent.mkdir()
        write(entry)
    assert len(path.read_text().splitlines()) == 1


def test_lines_of_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pdhub.decisions"):
        to_logger(Entry(view("r-9"), decision(), "v1"))
    assert json.loads(caplog.records[0].getMessage())["request"]["id"] == "r-9"


def test_two_threads_may_read_one_decision() -> None:
    for _ in range(20):
        both = threading.Barrier(2)

        def make(both: threading.Barrier = both) -> list[Candidate]:
            both.wait(5)
            return [Candidate("p", "b"), Candidate("p", "a")]

        lazy = Candidates(make)
        found: list[tuple[Candidate, ...]] = []
        threads = [threading.Thread(target=lambda lazy=lazy, found=found: found.append(tuple(lazy))) for _ in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [[c.node for c in each] for each in found] == [["a", "b"], ["a", "b"]]
