"""Which decode node is taken out because of KV that it holds for nobody, and when it is back."""

import logging

import pytest

from pdhub.api.client import EngineClient
from pdhub.api.engine import EngineLoad
from pdhub.api.policy import Health
from pdhub.config.models import RecycleConfig
from pdhub.core.latency import LatencyModel
from pdhub.router.breaker import Breaker
from pdhub.router.endpoint import Endpoint
from pdhub.router.fleet import Fleet, Pool
from pdhub.router.recycle import WITHIN_S, Recycler

HELD = EngineLoad(running=0, waiting=0, kv_usage=0.2)
FREE = EngineLoad(running=0, waiting=0, kv_usage=0.0)


class Client(EngineClient):
    lets_go_lost_s = 30.0

    def probe(self, node):
        raise NotImplementedError

    capabilities = prefill = decode = probe


class World:
    """Two decode nodes of one pool and their prefill instance; probes of all once a second."""

    def __init__(self, *names, hosted=False, **config):
        self.now = 1000.0
        names = names or ("a", "b")
        make = lambda name, role: Endpoint(  # noqa: E731
            name, "http://x", breaker=Breaker(2, 2.0, 2.0), probe_failures=3, hosted=hosted, role=role
        )
        self.nodes = {name: make(name, "decode") for name in names}
        self.prefill = make("p", "prefill")
        self.loads = dict.fromkeys(names, FREE)
        self.down = set()
        pool = Pool("pool", Client(), self.nodes, frozenset({"m"}))
        fleet = Fleet([pool], [self.prefill], pair_open_s=1.0, latency=LatencyModel(), load_stale_s=4.0, waiting=dict)
        config = RecycleConfig.model_validate({"nodes": names, **config})
        self.recycler = Recycler(fleet, config, lambda: self.now)
        self.pass_(1)

    def pass_(self, seconds):
        for _ in range(seconds):
            self.now += 1.0
            for endpoint in (*self.nodes.values(), self.prefill):
                if endpoint.name in self.down:
                    endpoint.missed("cannot be reached", gone=True)
                else:
                    endpoint.told(self.loads.get(endpoint.name, FREE), self.now)
                    endpoint.answered({"x": 1}, self.now)
                self.recycler.probed(endpoint)

    def states(self):
        return {name: found["state"] for name, found in self.recycler.document().items()}

    def usable(self):
        return {name for name, node in self.nodes.items() if node.usable(self.now)}


def test_a_node_is_taken_out_then_named_and_is_back_when_another_process_answers():
    world = World()
    world.loads["a"] = HELD
    world.pass_(11)
    assert world.states() == {"a": "draining"}
    assert world.usable() == {"b"}
    assert world.nodes["a"].health(world.now) is Health.DRAINING
    assert dict(world.recycler.ratios()) == {"a": 0.2, "b": 0.0}
    world.pass_(1)
    assert world.states() == {"a": "restart"}
    assert world.recycler.document()["a"]["kv"] == 0.2
    world.down = {"a"}
    world.pass_(20)
    assert world.states() == {"a": "draining"}
    assert dict(world.recycler.ratios())["a"] == 0.0
    world.down, world.loads["a"] = set(), FREE
    world.pass_(1)
    assert world.states() == {}
    assert world.usable() == {"a", "b"}


def test_a_new_process_is_not_named_whatever_it_holds():
    world = World()
    world.loads["a"] = HELD
    world.pass_(12)
    world.down = {"a"}
    world.pass_(30)
    world.down = set()
    world.pass_(1)
    assert world.states() == {}
    world.pass_(29)  # and it serves for as long as its restart took
    assert world.states() == {"a": "held"}
    assert world.usable() == {"a", "b"}
    world.pass_(5)
    assert world.states() == {"a": "restart"}


def test_it_is_not_named_while_it_has_work():
    world = World()
    world.loads["a"] = HELD
    world.pass_(11)
    node = world.nodes["a"]
    node.count(+1, world.now)  # was chosen just before
    world.pass_(5)
    assert world.states() == {"a": "draining"}
    world.now += 0.1
    node.count(-1, world.now)
    world.pass_(1)
    assert world.states() == {"a": "draining"}, "there was work since the last look"
    world.loads["a"] = EngineLoad(running=1, waiting=0, kv_usage=0.3)  # another router's
    world.pass_(2)
    assert world.states() == {"a": "draining"}
    world.loads["a"] = HELD
    world.pass_(1)
    assert world.states() == {"a": "restart"}
    node.count(+1, world.now)
    assert world.states() == {"a": "draining"}, "also between two probes"


@pytest.mark.parametrize("busy", ["in flight", "owed"])
def test_a_request_or_a_write_that_is_still_to_come_is_no_stranded_kv(busy):
    world = World()
    world.loads["a"] = HELD
    if busy == "owed":
        world.nodes["a"].owed = 1
    else:
        world.nodes["a"].count(+1, world.now)
    world.pass_(60)
    assert world.states() == {}


def test_a_short_request_between_two_probes_counts():
    world = World()
    world.loads["a"] = HELD
    for _ in range(6):
        world.pass_(5)
        world.nodes["a"].count(+1, world.now)
        world.now += 0.1
        world.nodes["a"].count(-1, world.now)
    assert world.states() == {}


@pytest.mark.parametrize(
    ("names", "options", "why"),
    [
        ("ab", {"when": "never"}, "when is never"),
        ("ab", {"nodes": ["b"]}, "nodes does not name it"),
        ("ab", {"above": 0.5}, "not more than 50.0%"),
        ("a", {}, "no other node of its pool can serve"),
    ],
)
def test_what_is_not_started_again_stays_in_and_is_said_once(names, options, why, caplog):
    caplog.set_level(logging.WARNING, "pdhub.router.recycle")
    world = World(*names, **options)
    world.loads["a"] = HELD
    world.pass_(30)
    assert world.states() == {"a": "held"}
    assert "a" in world.usable()
    assert dict(world.recycler.ratios())["a"] == 0.2
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1
    assert "20.0% of its KV memory for nobody" in said[0]
    assert why in said[0]


def test_the_only_node_goes_too_if_that_is_wanted():
    world = World("a", when="always")
    world.loads["a"] = HELD
    world.pass_(12)
    assert world.states() == {"a": "restart"}


def test_one_node_of_a_pool_at_a_time():
    world = World(when="always")
    world.loads |= {"a": HELD, "b": HELD}
    world.pass_(12)
    assert sorted(world.states().values()) == ["held", "restart"]
    (first,) = (name for name, state in world.states().items() if state == "restart")
    world.down = {first}
    world.pass_(10)
    assert len(world.usable()) == 1
    world.down, world.loads[first] = set(), FREE
    world.pass_(2)
    assert list(world.states().values()) == ["restart"]
    assert world.usable() == {first}


def test_it_is_back_when_it_has_let_go_or_the_spare_is_gone_or_nobody_starts_it():
    world = World()
    world.loads["a"] = HELD
    world.pass_(12)
    world.loads["a"] = FREE
    world.pass_(1)
    assert world.usable() == {"a", "b"}
    world = World()
    world.loads["a"] = HELD
    world.pass_(12)
    world.down = {"b"}
    world.pass_(4)
    assert world.usable() == {"a"}
    world = World()
    world.loads["a"] = HELD
    world.pass_(12 + int(WITHIN_S))
    assert world.states() == {"a": "held"}
    assert world.usable() == {"a", "b"}


def test_a_lost_prefill_instance_is_known_until_nothing_is_held():
    """Then this engine lets go by itself within half a minute, which is waited for."""
    world = World()
    world.down = {"p"}
    world.loads["a"] = HELD
    world.pass_(1)
    world.down = set()
    world.pass_(30)
    assert world.states() == {}
    world.pass_(10)
    assert world.states() == {"a": "draining"}


def test_a_prefill_instance_keeps_kv_until_it_is_fetched():
    world = World()
    world.loads["p"] = HELD
    world.pass_(60)
    assert (world.states(), world.prefill.retiring) == ({}, "")


def test_nodes_of_pdhub_node_free_their_own_memory():
    world = World(hosted=True)
    world.loads["a"] = HELD
    world.pass_(30)
    assert (world.states(), list(world.recycler.ratios())) == ({}, [])


def test_the_names_of_nodes_must_exist():
    from pdhub.api.errors import ConfigError
    from pdhub.config.checks import check_config
    from pdhub.config.models import Config
    from pdhub.config.origin import Origins

    data = {
        "model": {"name": "m"},
        "router": {"recycle": {"nodes": ["n", "other"]}},
        "pools": [{"name": "p", "engine": {"type": "x"}, "nodes": [{"name": "n", "port": 1}]}],
        "policy": {"type": "x"},
    }
    with pytest.raises(ConfigError, match="no pool has a node 'other'"):
        check_config(Config.model_validate(data), Origins())
