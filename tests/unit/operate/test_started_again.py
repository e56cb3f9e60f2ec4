"""Members that the router wants started again: by the supervisor, one at a time, and not as a failure."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from pdhub.api import Launcher, Process, Running
from pdhub.operate.backoff import RestartRule
from pdhub.operate.member import Member, State
from pdhub.operate.recycle import recycle, wanted
from pdhub.operate.supervisor import Supervisor

WHY = "12% was held"


class Fake(Running):
    """A process that ends as it is told."""

    def __init__(self, name, stubborn):
        self._name, self.stubborn = name, stubborn
        self.status, self.got = None, []

    @property
    def name(self):
        return self._name

    def poll(self):
        return self.status

    def terminate(self):
        self.got.append("term")
        if not self.stubborn:
            self.status = 0

    def kill(self):
        self.got.append("kill")
        self.status = -9


class Fakes(Launcher):
    def __init__(self):
        self.started, self.stubborn = [], set()

    def start(self, name, process, on_line):
        self.started.append(Fake(name, name in self.stubborn))
        return self.started[-1]

    def close(self):
        pass

    def of(self, name):
        return [fake for fake in self.started if fake.name == name]


class Tree:
    def __init__(self, *names, stop_within_s=0.2):
        self.fakes, self.events, self.mute = Fakes(), [], set()
        processes = [(name, Process(argv=("x",), ready_url=name, ready_within_s=5.0)) for name in names]
        members = [Member(name, process, stop_within_s=stop_within_s) for name, process in processes]

        async def probe(url):
            return url not in self.mute

        self.supervisor = Supervisor(
            self.fakes, [members], probe=probe, on_event=self.events.append, on_line=lambda *_: None,
            rule=RestartRule(first_s=0.01, cap_s=0.01, give_up_after=1),
        )  # fmt: skip

    def told(self, name):
        return [(event.state, event.text) for event in self.events if event.name == name]


@pytest.fixture
async def tree():
    found = Tree("a", "b")
    await found.supervisor.start()
    yield found
    await found.supervisor.stop()


async def test_it_is_drained_and_started_anew_and_the_others_are_left_alone(tree):
    assert await tree.supervisor.again("a", WHY)
    old, new = tree.fakes.of("a")
    assert (old.got, new.status) == (["term"], None)
    assert len(tree.fakes.of("b")) == 1
    states = [state for state, _ in tree.told("a")]
    assert states == [State.STARTING, State.READY, State.STARTING, State.STARTING, State.READY]
    assert tree.told("a")[2][1] == f"stopping, to be started again: {WHY}"


async def test_who_does_not_drain_is_killed(tree):
    tree.fakes.of("a")[0].stubborn = True
    assert await tree.supervisor.again("a", WHY)
    assert tree.fakes.of("a")[0].got == ["term", "kill"]


async def test_it_is_no_failure(tree):
    """One more failure is still forgiven after any number of them (``give_up_after=1``)."""
    keeper = tree.supervisor._keepers[0][0]
    for _ in range(4):
        keeper._not_before = 0.0
        assert await tree.supervisor.again("a", WHY)
    tree.fakes.of("a")[-1].status = 7
    await _until(lambda: len(tree.fakes.of("a")) == 6)
    await _until(lambda: keeper.state is State.READY)


async def test_who_never_served_gets_no_time_to_drain(monkeypatch):
    monkeypatch.setattr("pdhub.operate.keeper.UNSERVED_S", 0.05)
    found = Tree("a", stop_within_s=3600.0)
    found.mute, found.fakes.stubborn = {"a"}, {"a"}
    start = asyncio.create_task(found.supervisor.start())
    await _until(lambda: found.fakes.started)
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    await found.supervisor.stop()
    assert found.fakes.started[0].got == ["term", "kill"]
    assert found.told("a")[-1] == (State.STOPPED, "did not stop within 0.05 s: killed")


async def test_refused_where_it_does_not_serve(tree):
    assert not await tree.supervisor.again("nobody", WHY)
    tree.mute = {"a", "b"}
    assert tree.supervisor._keepers[0][0].again(WHY)
    assert not await tree.supervisor.again("a", WHY), "it is being started"
    tree.fakes.of("b")[0].status = 1
    await _until(lambda: tree.told("b")[-1][0] is State.WAITING)
    assert not await tree.supervisor.again("b", WHY), "it died by itself"


async def test_it_serves_for_as_long_as_that_took(tree, monkeypatch):
    passed_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s)
    monkeypatch.setattr("pdhub.operate.keeper.time", clock)
    tree.mute = {"a"}
    asked = asyncio.create_task(tree.supervisor.again("a", WHY))
    await _until(lambda: len(tree.fakes.of("a")) == 2)
    passed_s, tree.mute = 100.0, set()
    assert await asked
    assert not await tree.supervisor.again("a", WHY)
    passed_s = 300.0
    assert await tree.supervisor.again("a", WHY)


async def test_trouble_at_the_new_start_is_told_and_does_not_block(tree):
    asked = asyncio.create_task(tree.supervisor.again("a", WHY))
    await _until(lambda: len(tree.fakes.of("a")) == 2)
    tree.fakes.of("a")[-1].status = 1
    assert await asked


async def test_one_after_the_other_what_the_router_names(tree):
    document = {"stranded": {name: {"kv": 0.12, "state": "restart"} for name in ("a", "b")}}
    tree.mute = {"a"}  # does not get ready for now
    asked = 0

    async def ask():
        nonlocal asked
        asked += 1
        return document

    watching = asyncio.create_task(recycle(tree.supervisor, ask, 0.01))
    await _until(lambda: len(tree.fakes.of("a")) == 2)
    await asyncio.sleep(0.2)
    assert (asked, len(tree.fakes.of("b"))) == (1, 1)
    del document["stranded"]["a"]
    tree.mute = set()
    await _until(lambda: len(tree.fakes.of("b")) == 2)
    document["stranded"].clear()
    watching.cancel()
    assert len(tree.fakes.of("a")) == 2
    assert tree.told("b")[2][1] == "stopping, to be started again: 12.0% of its KV memory was held for nobody"


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"stranded": []},
        {"stranded": {"a": None}},
        {"stranded": {"a": {"kv": 0.5, "state": "held"}, "b": {"kv": 0.5, "state": "draining"}}},
    ],
)
def test_nothing_else_is_read_as_a_wish(document):
    assert list(wanted(document)) == []


async def _until(what):
    for _ in range(1000):
        if what():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never")
