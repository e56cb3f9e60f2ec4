"""`pdhub doctor`: every plugin's checks once, the worst first, whatever a plugin does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from pdhub import registry
from pdhub.api import (
    ConfigError,
    EngineSpec,
    Finding,
    NodeSpec,
    Operate,
    PluginConfig,
    Severity,
    Topology,
    hookimpl,
)
from pdhub.cli.tables import findings_json, findings_text
from pdhub.config.build import Plan, build_plan
from pdhub.config.models import Config
from pdhub.config.topology import topology
from pdhub.operate.doctor import examine, failed
from pdhub.testing import toy

Checks = Callable[[str, Topology], Sequence[Finding]]


class Options(PluginConfig):
    tag: str = Field("", description="Tells options apart.")
    child: str = Field("", description="What the prefill instance needs.")


class Sick(Operate):
    def __init__(self, options: Options, checks: Checks) -> None:
        self._options, self._checks = options, checks

    def prefill_child(self, node: NodeSpec, topology: Topology) -> Mapping[str, Any] | None:
        return {"name": self._options.child} if self._options.child else None

    def refusals(self, topology: Topology) -> Sequence[Finding]:
        many = [n.name for n in topology.nodes if len(n.children) > 1]
        return [Finding(Severity.ERROR, name, "two children", "split it") for name in many]

    def checks(self, topology: Topology) -> Sequence[Finding]:
        return self._checks(self._options.tag, topology)


def plan(checks: Checks, *pools: Mapping[str, Any], prefills: Sequence[Mapping[str, Any]] = ({},)) -> Plan:
    class Plugin:
        @hookimpl
        def pdhub_register_engines(self) -> list[EngineSpec]:
            operate = lambda options: Sick(options, checks)  # noqa: E731
            return [EngineSpec(name="sick", summary="s", config=Options, operate=operate, runtime=lambda *_: None)]

    port = iter(range(9000, 9100))
    config = {
        "model": {"name": "m"},
        "prefill": [
            {"name": f"p{i}", "port": next(port), "launch": False, "engine": {"type": "toy"}, **p}
            for i, p in enumerate(prefills)
        ],
        "pools": [
            {
                "name": f"pool{i}",
                "engine": {"type": "sick", "config": options},
                "nodes": [{"name": f"n{i}", "port": next(port)}],
            }
            for i, options in enumerate(pools)
        ],
        "policy": {"type": "round_robin"},
    }  # fmt: skip
    return build_plan(Config.model_validate(config), registry.load(extra=[Plugin(), toy]), Path("c.yaml"))


def found(severity: Severity, message: str = "x") -> Finding:
    return Finding(severity, "here", message)


def test_each_set_of_options_is_asked_once() -> None:
    asked: list[str] = []
    examine(plan(lambda tag, _: asked.append(tag) or (), {"tag": "a"}, {"tag": "a"}, {"tag": "b"}))
    assert sorted(asked) == ["a", "b"]


def test_the_worst_comes_first_and_nothing_twice() -> None:
    told = [found(Severity.INFO), found(Severity.ERROR), found(Severity.WARNING)]
    findings = examine(plan(lambda *_: told, {"tag": "a"}, {"tag": "b"}))
    assert [f.severity for f in findings] == [Severity.ERROR, Severity.WARNING, Severity.INFO]
    assert failed(findings)
    assert not failed(findings[1:])


def test_a_broken_plugin_is_a_finding(caplog: pytest.LogCaptureFixture) -> None:
    def checks(tag: str, _: Topology) -> Sequence[Finding]:
        if tag == "bad":
            raise ZeroDivisionError("oops")
        return [found(Severity.INFO)]

    findings = examine(plan(checks, {"tag": "bad"}, {"tag": "good"}))
    assert [(f.severity, f.where) for f in findings] == [(Severity.ERROR, "pool0"), (Severity.INFO, "here")]
    assert "ZeroDivisionError" in findings[0].message


def test_a_plugin_that_hangs_is_a_finding() -> None:
    free = threading.Event()
    try:
        (finding,) = examine(plan(lambda *_: (free.wait(20) and ()) or (), {}), within_s=0.1)
    finally:
        free.set()
    assert finding.severity is Severity.ERROR
    assert "longer than 0.1 s" in finding.message


def test_keys_are_there_for_checks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    made = plan(
        lambda _, whole: seen.extend(n.api_key for n in whole.nodes) or (), {}, prefills=[{"api_key_env": "KEY_X"}]
    )
    monkeypatch.setenv("KEY_X", "hidden")
    examine(made)
    assert seen == ["hidden", None]
    whole = topology(made)
    assert whole.nodes[0].api_key is None
    assert whole.nodes[0].api_key_env == "KEY_X"
    assert "hidden" not in repr(topology(made, secrets=True))
    monkeypatch.delenv("KEY_X")
    with pytest.raises(ConfigError, match="KEY_X"):
        examine(made)


def test_children_reach_the_instances_that_serve_the_pool() -> None:
    prefills = [{"pools": ["pool0", "pool1"]}, {"pools": ["pool2"]}]
    whole = topology(plan(lambda *_: (), {"child": "a"}, {"child": "a"}, {"child": "b"}, prefills=prefills))
    assert [n.children for n in whole.nodes[:2]] == [({"name": "a"},), ({"name": "b"},)]
    assert [n.name for n in whole.prefills_of("pool2")] == ["p1"]


def test_what_a_plugin_refuses_is_no_plan() -> None:
    with pytest.raises(ConfigError, match="two children") as raised:
        plan(lambda *_: (), {"child": "a"}, {"child": "b"})
    assert raised.value.hint == "split it"
    split = [{"pools": ["pool0"]}, {"pools": ["pool1"]}]
    assert plan(lambda *_: (), {"child": "a"}, {"child": "b"}, prefills=split)


def test_every_pool_that_needs_prefill_is_served() -> None:
    with pytest.raises(ConfigError, match="needs a prefill instance") as raised:
        plan(lambda *_: (), {}, {}, prefills=[{"pools": ["pool0"]}])
    assert "pool1" in str(raised.value.hint)
    with pytest.raises(ConfigError, match="no pool is named 'nobody'"):
        plan(lambda *_: (), {}, prefills=[{"pools": ["nobody"]}])


def test_for_people_and_for_programs() -> None:
    findings = [Finding(Severity.ERROR, "p0", "is down", "start it"), found(Severity.INFO)]
    assert findings_text(findings, color=False).splitlines() == [
        "error  p0: is down", "    fix: start it", "info  here: x", "1 error, 1 info"
    ]  # fmt: skip
    assert findings_text([], color=False) == "nothing found"
    assert '"severity": "error"' in findings_json(findings)
