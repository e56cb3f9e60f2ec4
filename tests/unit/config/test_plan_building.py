"""File, environment and flags become a plan; whatever is wrong says where, what and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from pdhub.api import ConfigError, LegOrder, PDHubError, PluginError
from pdhub.config.build import load_plan, needs_prefill
from pdhub.config.checks import check_model
from pdhub.config.show import values


def test_a_good_file(write: Any, base: str, registry: Any) -> None:
    plan = load_plan(write(base), registry=registry)
    assert list(plan.pools) == ["fast", "general"]
    assert plan.pools["general"].config.slots == 4  # type: ignore[attr-defined]
    assert plan.prefill["prefill-0"].spec.name == "demo"
    assert plan.transport.spec.name == "shm"
    assert plan.launcher.spec.name == "local"
    assert plan.path is not None


# (what is appended or replaced, what the message must hold, what the hint must hold)
BAD = {
    "unknown key": ("model: {name: m}", "model: {name: m, nane: x}", "model.nane (c.yaml:1): unknown key", "'name'"),
    "unknown section": ("policy:", "rooter: {port: 1}\npolicy:", "rooter (c.yaml:16): unknown key", "'router'"),
    "unknown node key": ("port: 9001}", "prt: 9001}", "pools[0].nodes[0].", "port"),
    "far key": ("model: {name: m}", "model: {name: m, zzzzzz: 1}", "unknown key 'zzzzzz'", "known keys: aliases"),
    "plugin option": ("slots: 4", "slotz: 4", "pools[1].engine.config.slotz (c.yaml:11): unknown key", "'slots'"),
    "nested option": ("slots: 4", "inner: {dept: 1}", "engine.config.inner.dept (c.yaml:11)", "'depth'"),
    "option in a list": ("slots: 4", "many: [{dept: 1}]", "engine.config.many[0].dept", "'depth'"),
    "option in a mapping": ("slots: 4", "by_name: {a: {dept: 1}}", "engine.config.by_name.a.dept", "'depth'"),
    "wrong type": ("port: 9001", "port: soon", "pools[0].nodes[0].port (c.yaml:6): input should be", "Port of"),
    "out of range": ("port: 9001", "port: 99999", "not 99999", "Port of"),
    "wrong option": ("slots: 4", "slots: 0", "pools[1].engine.config.slots (c.yaml:11)", "Requests at once."),
    "missing key": ("model: {name: m}", "model: {}", "model.name (c.yaml:1): this key is required", "Id that clients"),
    "missing section": ("policy: {type: demo, config: {pool: fast}}", "", "policy (c.yaml): this", "Routing policy"),
    "empty pools": ("prefill:", "unused: 1\nprefill:", "unused", "known keys"),
    "bad name": ("name: fast-0", "name: Fast 0", "pools[0].nodes[0].name (c.yaml:6)", "Unique name"),
    "unknown engine": ("engine: {type: demo}\n    nodes", "engine: {type: dmeo}\n    nodes",
                       "pools[0].engine.type (c.yaml:4): no engine plugin 'dmeo' is installed; installed: alone, demo",
                       "did you mean 'demo'?"),
    "missing package": ("engine: {type: demo}\n    nodes", "engine: {type: nixl}\n    nodes",
                        "no engine plugin 'nixl' is installed", "pip install pdhub-nixl"),
    "unknown policy": ("type: demo, config: {pool", "type: none, config: {pool", "no policy plugin 'none'", "plugins"),
    "policy names no pool": ("pool: fast}", "pool: fsat}", "policy.config (c.yaml:16): pool names no pool: 'fsat'",
                             "the pools are: fast, general"),
    "same pool name": ("name: general\n", "name: fast\n", "two pools are named 'fast'", "is at pools[0].name"),
    "same node name": ("name: general-0", "name: fast-0", "pools[1].nodes[0].name (c.yaml:13): two", "rename"),
    "prefill and node": ("name: prefill-0", "name: fast-0", "two nodes are named 'fast-0'", "prefill[0].name"),
    "port clash": ("port: 9002", "port: 9001", "port 9001 of 127.0.0.1 is used twice", "pools[0].nodes[0].port"),
    "port of the router": ("port: 9002", "port: 8000", "port 8000 of 127.0.0.1 is used twice", "router.port"),
    "control port": ("port: 9002", "port: 9002, control_port: 9001", "port 9001", "pools[0].nodes[0].port"),
    "wildcard address": ("port: 9002", "port: 9001, host: 0.0.0.0", "port 9001 of 0.0.0.0 is used twice", "first"),
    "not launched": ("port: 9002", "port: 0, launch: false", "a node that is not launched", "give the port"),
    "alias": ("model: {name: m}", "model: {name: m, aliases: [a, m]}", "two models are named 'm'", "model.name"),
    "cannot decode": ("engine: {type: demo}\n    nodes", "engine: {type: source}\n    nodes",
                      "pools[0].engine.type (c.yaml:4): engine 'source' cannot decode", "prefill:"),
    "cannot prefill": ("9003, engine: {type: demo}", "9003, engine: {type: alone}",
                       "engine 'alone' cannot prefill", "launch: false"),
    "no prefill": ("  - {name: prefill-0, port: 9003, engine: {type: demo}}", "  []",
                   "engine 'demo' needs a prefill instance", "add an instance under `prefill:`"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message", "hint"), BAD.values(), ids=BAD)
def test_bad_input(
    write: Any, base: str, registry: Any, monkeypatch: pytest.MonkeyPatch, old: str, new: str, message: str, hint: str
) -> None:
    assert old in base
    path = write(base.replace(old, new, 1))
    monkeypatch.chdir(path.parent)
    with pytest.raises(PDHubError) as caught:
        load_plan("c.yaml", registry=registry)
    assert message in caught.value.message
    assert caught.value.hint, "it does not say what to do"
    assert hint in str(caught.value)


def test_several_problems_are_all_told(write: Any, base: str, registry: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_plan(write(base.replace("port: 9001", "port: x").replace("port: 9002", "prot: 9002")), registry=registry)
    text = str(caught.value)
    assert text.startswith("3 problems")
    for place in ("pools[0].nodes[0].port", "pools[1].nodes[0].prot", "pools[1].nodes[0].port"):
        assert place in text


def test_secrets_are_not_repeated(write: Any, base: str, registry: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_plan(write(base.replace("slots: 4", "api_key: hunter2")), registry=registry)
    assert "hunter2" not in str(caught.value)


def test_remote_nodes_may_share_a_port_number(write: Any, base: str, registry: Any) -> None:
    text = base.replace("port: 9001", "port: 9000, host: 10.0.0.1").replace("port: 9002", "port: 9000, host: 10.0.0.2")
    assert load_plan(write(text), registry=registry)


def test_a_pool_that_prefills_itself_needs_no_prefill(write: Any, base: str, registry: Any) -> None:
    text = base.replace("engine: {type: demo}\n    nodes", "engine: {type: alone}\n    nodes", 1)
    text = text.replace("type: demo\n      config:\n        slots: 4", "type: alone")
    plan = load_plan(
        write(text.replace("  - {name: prefill-0, port: 9003, engine: {type: demo}}", "  []")), registry=registry
    )
    assert not plan.prefill
    assert not needs_prefill(plan.pools["fast"])


def test_the_order_is_default_file_environment_flag(
    write: Any, base: str, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(base + "router: {port: 8001, retries: 2, idle_timeout_s: 7}\n")
    monkeypatch.setenv("PDHUB_ROUTER__RETRIES", "3")
    monkeypatch.setenv("PDHUB_ROUTER__IDLE_TIMEOUT_S", "8")
    plan = load_plan(path, registry=registry, overrides=["router.idle_timeout_s=9"])
    router = plan.config.router
    assert (router.host, router.port, router.retries, router.idle_timeout_s) == ("127.0.0.1", 8001, 3, 9)
    shown = {name: (value, source) for name, value, source in values(plan)}
    assert shown["router.host"] == ("127.0.0.1", "default")
    assert shown["router.port"] == (8001, f"{path}:17")
    assert shown["router.retries"] == (3, "env PDHUB_ROUTER__RETRIES")
    assert shown["router.idle_timeout_s"] == (9.0, "--set router.idle_timeout_s")
    assert shown["pools[1].engine.config.slots"] == (4, f"{path}:11")
    assert shown["pools[0].engine.config.slots"] == (1, "default")


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("pools.0.cost=2", lambda c: c.pools[0].cost == 2),
        ("pools[0].cost=2", lambda c: c.pools[0].cost == 2),
        ("pools.general.cost=2", lambda c: c.pools[1].cost == 2),
        ("pools.general.nodes.general-0.port=9100", lambda c: c.pools[1].nodes[0].port == 9100),
        ("pools.fast.engine.config.slots=3", lambda c: c.pools[0].engine.config == {"slots": 3}),
        ("model.aliases=[a, b]", lambda c: c.model.aliases == ["a", "b"]),
        ('model.name="007"', lambda c: c.model.name == "007"),
        ("model.path=/a=b", lambda c: c.model.path == "/a=b"),
        ("handoff.transport.type=tcp", lambda c: c.handoff.transport.type == "tcp"),
    ],
)
def test_flags_reach_every_value(write: Any, base: str, registry: Any, override: str, read: Any) -> None:
    assert read(load_plan(write(base), registry=registry, overrides=[override]).config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("router.port", "no assignment"),
        ("=1", "no assignment"),
        ("router..port=1", "no assignment"),
        ("pools.slow.cost=1", "no member 'slow'"),
        ("pools.9.cost=1", "no member '9'"),
        ("model.name.x=1", "below a plain value"),
        ("router.port={", "not a YAML value"),
        ("router.prot=1", "unknown key 'prot'"),
    ],
)
def test_bad_flags(write: Any, base: str, registry: Any, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_plan(write(base), registry=registry, overrides=[override])
    assert "--set" in caught.value.message
    assert caught.value.hint


def test_bad_environment(write: Any, base: str, registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDHUB_ROUTR__PORT", "1")
    with pytest.raises(ConfigError, match="PDHUB_ROUTR__PORT") as caught:
        load_plan(write(base), registry=registry)
    assert "PDHUB_ROUTER__" in str(caught.value.hint)


def test_variables_that_orchestrators_make_are_ignored(
    write: Any, base: str, registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PDHUB_PORT", "PDHUB_SERVICE_HOST", "PDHUB_ROUTER_PORT_8000_TCP_ADDR"):
        monkeypatch.setenv(name, "tcp://10.0.0.1:8000")
    assert load_plan(write(base), registry=registry).config.router.port == 8000


def test_strict_plugins_is_read_from_the_environment(write: Any, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDHUB_STRICT_PLUGINS", "perhaps")
    with pytest.raises(ConfigError, match="PDHUB_STRICT_PLUGINS") as caught:
        load_plan(write(base))
    assert "1 or 0" in str(caught.value.hint)


def test_a_client_that_raises_is_the_plugins_fault() -> None:
    from pdhub.api import EngineSpec, NoConfig
    from pdhub.config.build import Resolved

    def broken(config: Any) -> Any:
        raise KeyError("x")

    engine = Resolved(EngineSpec(name="bad", summary="x", client=broken), NoConfig())
    with pytest.raises(PluginError, match="client of engine 'bad'"):
        needs_prefill(engine)
    assert LegOrder.DECODE_ONLY


def test_a_missing_model_is_found_before_anything_starts(write: Any, base: str, registry: Any) -> None:
    plan = load_plan(write(base), registry=registry, overrides=["model.path=/nowhere/model.gguf"])
    with pytest.raises(ConfigError, match="no file or directory") as caught:
        check_model(plan.config, plan.origins, detokenises=False)
    assert caught.value.where == "model.path (--set model.path)"
    assert caught.value.hint


def test_a_model_of_other_machines_need_not_be_here(write: Any, base: str, registry: Any) -> None:
    away = [f"{place}.host=10.0.0.{i}" for i, place in enumerate(("prefill.0", "pools.0.nodes.0", "pools.1.nodes.0"))]
    overrides = ["model.path=/nowhere/model.gguf", *away]
    plan = load_plan(write(base), registry=registry, overrides=overrides)
    check_model(plan.config, plan.origins, detokenises=False)
    with pytest.raises(ConfigError, match="no file or directory"):
        check_model(plan.config, plan.origins, detokenises=True)
    here = load_plan(write(base), registry=registry, overrides=[*overrides, "pools.1.nodes.0.host=localhost"])
    with pytest.raises(ConfigError, match="no file or directory"):
        check_model(here.config, here.origins, detokenises=False)
