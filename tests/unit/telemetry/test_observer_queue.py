"""Observers are told off the loop; what they cannot keep up with is dropped and counted."""

from __future__ import annotations

import logging
import threading

import pytest

from pdhub.api import RequestRecord
from pdhub.telemetry.observer import Observer


def record(name: str) -> RequestRecord:
    return RequestRecord(name, "m", None, None, None, "no-slo", "ok")


def test_records_arrive_in_order_in_another_thread() -> None:
    seen: list[tuple[str, int]] = []
    observer = Observer(lambda r: seen.append((r.id, threading.get_ident())))
    assert all(observer.offer(record(str(n))) for n in range(20))
    assert observer.close()
    assert [name for name, _ in seen] == [str(n) for n in range(20)]
    assert threading.get_ident() not in {thread for _, thread in seen}
    assert observer.dropped == 0


def test_a_slow_observer_costs_records_and_never_time() -> None:
    free, started, seen = threading.Event(), threading.Event(), []

    def slow(item: RequestRecord) -> None:
        started.set()
        free.wait(30)
        seen.append(item.id)

    observer = Observer(slow, limit=2)
    assert observer.offer(record("running"))
    assert started.wait(30)
    assert [observer.offer(record(str(n))) for n in range(5)] == [True, True, False, False, False]
    assert observer.dropped == 3
    free.set()
    assert observer.close()
    assert seen == ["running", "0", "1"]


def test_an_observer_that_raises_is_logged_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    def picky(item: RequestRecord) -> None:
        if item.id == "bad":
            raise ValueError("no")
        seen.append(item.id)

    observer = Observer(picky)
    with caplog.at_level(logging.ERROR, "pdhub.telemetry"):
        for name in ("a", "bad", "b"):
            observer.offer(record(name))
        assert observer.close()
    assert seen == ["a", "b"]
    assert "bad" in caplog.text


def test_closing_twice_and_offering_late() -> None:
    observer = Observer(lambda _: None)
    assert observer.close()
    assert observer.close()
    assert not observer.offer(record("late"))
    assert observer.dropped == 1


def test_close_gives_up_on_an_observer_that_blocks() -> None:
    free = threading.Event()
    observer = Observer(lambda _: bool(free.wait(30)), limit=1)
    observer.offer(record("a"))
    assert not observer.close(timeout_s=0.05)
    free.set()
    assert observer.close()
