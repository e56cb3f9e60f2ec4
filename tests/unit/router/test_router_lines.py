"""Lines in front of prefill instances, on the event loop: who waits is told of its turn, or to look elsewhere."""

from __future__ import annotations

import asyncio

import pytest

from pdhub.api import AdmissionRejected
from pdhub.core.admission import Ticket
from pdhub.core.turns import Ahead
from pdhub.router.lines import Lines


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def ticket(name: str, priority: int = 0) -> Ticket:
    return Ticket(name, 100.0, priority, weight=10)


def make(*names: str) -> Lines:
    return Lines(names or ("a",), Ahead(tokens=10), Clock())


def taken(lines: Lines, instance: str, *names: str) -> None:
    for name in names:
        lines.offer(instance, ticket(name))


async def waiting(lines: Lines, instance: str, name: str, until: float = 50.0) -> asyncio.Task[bool]:
    task = asyncio.create_task(lines.wait(instance, ticket(name), until))
    await asyncio.sleep(0)
    return task


async def test_an_answer_gives_the_turn_to_the_next() -> None:
    lines = make()
    taken(lines, "a", "runs", "waits")
    assert lines.told() == {"a": (1, 10, 10)}
    task = await waiting(lines, "a", "waits")
    lines.leave("a", "runs", served=True)
    assert await task is True
    assert lines.told()["a"][:2] == (0, 10)
    lines.leave("a", "waits", served=False)
    assert lines.told()["a"][:2] == (0, 0)


async def test_who_waits_elsewhere_is_told_to_look() -> None:
    lines = make("a", "b")
    taken(lines, "a", "runs", "waits")
    taken(lines, "b", "other")
    task = await waiting(lines, "a", "waits")
    lines.leave("b", "other", served=True)
    assert await task is False
    assert lines.told()["a"][0] == 1, "it still waits"
    again = await waiting(lines, "a", "waits")
    lines.leave("a", "runs", served=True)
    assert await again is True


async def test_its_turn_comes_before_it_has_looked() -> None:
    lines = make("a", "b")
    taken(lines, "a", "runs", "waits")
    taken(lines, "b", "other")
    task = await waiting(lines, "a", "waits")
    lines.leave("b", "other", served=True)
    lines.leave("a", "runs", served=True)
    assert await task is True


async def test_the_router_shuts_down_before_it_has_looked() -> None:
    lines = make("a", "b")
    taken(lines, "a", "runs", "waits")
    taken(lines, "b", "other")
    task = await waiting(lines, "a", "waits")
    lines.leave("b", "other", served=True)
    lines.close()
    with pytest.raises(AdmissionRejected) as refused:
        await task
    assert (refused.value.contended, refused.value.reason) == (False, "rejected-shutting-down")


async def test_told_to_look_while_nobody_listens() -> None:
    lines = make("a", "b")
    taken(lines, "a", "runs", "waits")
    taken(lines, "b", "other")
    lines.leave("b", "other", served=True)
    lines.leave("a", "waits", served=False)
    lines.leave("a", "runs", served=True)
    assert {name: told[:2] for name, told in lines.told().items()} == {"a": (0, 0), "b": (0, 0)}


async def test_a_larger_bound_lets_more_be_sent() -> None:
    lines = make()
    taken(lines, "a", "runs", "waits")
    task = await waiting(lines, "a", "waits")
    lines.set_ahead(Ahead(tokens=20))
    assert await task is True


async def test_where_least_is_ahead() -> None:
    lines = make("a", "b")
    taken(lines, "a", "runs", "waits")
    found = lines.backlog({"a": 30, "b": 7}, ticket("me"))
    assert found is not None
    assert found.tokens == 7
    assert lines.backlog({}, ticket("me")) is None
