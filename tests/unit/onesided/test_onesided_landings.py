"""When a target's memory is used again, and when it is put out of reach."""

import threading

import pytest

from pdhub.onesided import landings as module
from pdhub.onesided.landings import Landings
from pdhub.onesided.wire import Kind


class FakeMemory:
    number, address, device, description = 7, 4096, "cpu", b"how"

    def __init__(self, detachable=True):
        self.detachable = detachable
        self.log = []

    def reuse(self):
        self.log.append("reuse")

    def detach(self):
        self.log.append("detach")
        return self.detachable

    def reclaim(self):
        self.log.append("reclaim")


class FakeWriter:
    def __init__(self):
        self.knows = set()
        self.heard = []
        self.answer = None

    def send(self, message):
        self.heard.append(message)
        if self.answer is not None:
            self.answer(message)

    def kinds(self):
        return [message.kind for message in self.heard]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "COOPERATE_S", 0.02)


@pytest.fixture
def world():
    landings, memory, writer = Landings(), FakeMemory(), FakeWriter()
    landings.add("r", memory, 100)
    return landings, memory, writer


def opened(landings, writer):
    token = landings.grant("r")
    landings.open(writer, token)
    return token


def nothing():
    return None


def test_an_address_is_told_only_for_a_grant(world):
    landings, _, writer = world
    landings.open(writer, bytes(32))
    assert writer.kinds() == [Kind.REFUSED]
    assert writer.heard[0].address == 0
    opened(landings, writer)
    answer = writer.heard[1]
    assert (answer.kind, answer.address, answer.nbytes, answer.extra) == (Kind.OPENED, 4096, 100, b"cpu\0how")
    opened(landings, writer)
    assert writer.heard[2].extra == b"cpu\0", "memory is described once a connection"


def test_memory_nobody_opened_is_used_again(world):
    landings, memory, _ = world
    landings.grant("r")
    landings.free("r", nothing)
    landings.free("r", nothing)
    assert memory.log == ["reuse"]


def test_freed_memory_waits_for_the_answer(world):
    landings, memory, writer = world
    token = opened(landings, writer)
    landings.free("r", nothing)
    assert writer.kinds()[-1] is Kind.RECALL
    assert memory.log == []
    landings.returned(writer, token)
    assert memory.log == ["reuse"]


def test_a_lost_writers_memory_is_put_out_of_reach(world):
    landings, memory, writer = world
    opened(landings, writer)
    landings.gone(writer)
    assert memory.log == [], "the host still has the landing"
    landings.free("r", nothing)
    assert memory.log == ["detach"]


def test_a_fence_that_is_answered_costs_no_memory(world):
    landings, memory, writer = world
    writer.answer = lambda m: (
        m.kind is Kind.REVOKED and threading.Thread(target=landings.returned, args=(writer, m.token)).start()
    )
    opened(landings, writer)
    module.COOPERATE_S = 20
    assert landings.fence("r", 60)
    landings.free("r", nothing)
    assert memory.log == ["reuse"]


def test_a_fence_without_an_answer_detaches(world):
    landings, memory, writer = world
    token = opened(landings, writer)
    assert landings.fence("r", 1)
    assert landings.fence("r", 1)
    assert memory.log == ["detach"]
    landings.open(writer, token)
    assert writer.kinds()[-1] is Kind.REFUSED
    with pytest.raises(ValueError):
        landings.grant("r")
    landings.free("r", nothing)
    assert memory.log == ["detach"], "it is never used again"
    landings.returned(writer, token)
    assert memory.log == ["detach", "reclaim"], "the late answer frees what can be freed"


def test_a_fence_says_when_it_proves_nothing():
    landings, memory, writer = Landings(), FakeMemory(detachable=False), FakeWriter()
    landings.add("r", memory, 100)
    opened(landings, writer)
    assert not landings.fence("r", 1)
    assert not landings.fence("r", 1)
    landings.gone(writer)
    landings.free("r", nothing)
    assert "reuse" not in memory.log


def test_one_lost_writer_of_two(world):
    landings, memory, writer = world
    other = FakeWriter()
    token = opened(landings, other)
    opened(landings, writer)
    landings.gone(writer)
    landings.free("r", nothing)
    assert memory.log == []
    landings.returned(other, token)
    assert memory.log == ["detach"]


def test_close_puts_open_memory_out_of_reach(world):
    landings, memory, writer = world
    opened(landings, writer)
    landings.close()
    landings.close()
    assert memory.log == ["detach"]
