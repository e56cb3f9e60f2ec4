"""The ``policy`` section: what may stand there, and what a mistake says."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pdhub.api.errors import ConfigError, PluginError
from pdhub.config.build import build_plan, parse_config
from pdhub.config.load import read
from pdhub.config.schema import json_schema
from pdhub.config.show import values
from pdhub.core.slo_classes import Trust
from pdhub.policies.match import Range
from pdhub.registry import Registry, load
from pdhub.testing import toy
from pdhub.testing.hub import toy_topology

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load(extra=[toy])


@pytest.fixture(scope="module")
def schema(registry: Registry) -> dict[str, Any]:
    made = json_schema(registry)
    jsonschema.Draft202012Validator.check_schema(made)
    return made


def topology(**policy: Any) -> dict[str, Any]:
    return {**copy.deepcopy(toy_topology()), "policy": {"type": "slo", **policy}}


def plan(registry: Registry, **policy: Any) -> Any:
    return build_plan(parse_config(topology(**policy)), registry)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_file_fits_the_schema(path: Path, schema: dict[str, Any]) -> None:
    data, _ = read(path)
    jsonschema.validate(data, schema, jsonschema.Draft202012Validator)


WRONG: dict[str, dict[str, Any]] = {
    "type": {"type": "slow"},
    "option": {"config": {"margn": 1}},
    "member": {"rulez": []},
    "rule": {"rules": [{"name": "r", "pool": ["fast"]}]},
    "match": {"rules": [{"name": "r", "pools": ["fast"], "match": {"modle": ["m"]}}]},
    "filter": {"filters": [{"type": "no-such-filter"}]},
    "filter-option": {"filters": [{"type": "slo_headroom", "config": {"margn": 1}}]},
    "scorer": {"scorers": [{"type": "slo_headroom"}]},
    "shadow": {"shadow": {"type": "slow"}},
    "class": {"slo_classes": {"c": {"ttft_ms": -1}}},
    "trust": {"tenants": {"t": {"trust": "some"}}},
    "key": {"tenants": {"t": {"api_key_sha256": ["secret"]}}},
    "clock": {"rules": [{"name": "r", "pools": ["fast"], "match": {"time": [{"start": "25:00"}]}}]},
}


@pytest.mark.parametrize("name", WRONG)
def test_an_editor_sees_what_check_refuses(name: str, registry: Registry, schema: dict[str, Any]) -> None:
    data = topology(**WRONG[name])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema, jsonschema.Draft202012Validator)
    with pytest.raises((ConfigError, PluginError)):
        build_plan(parse_config(data), registry)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"rules": [{"name": "r", "pools": ["fats"]}]}, "policy.rules[0].pools[0]: there is no pool 'fats'"),
        ({"rules": [{"name": "r", "weights": {"fats": 1}}]}, "policy.rules[0].weights.fats"),
        ({"rules": [{"name": "r", "pools": ["fast"], "fallback": ["x"]}]}, "policy.rules[0].fallback[0]"),
        ({"fallback": ["reserve"]}, "policy.fallback[0]"),
        ({"rules": [{"name": "r"}]}, "the rule says nothing"),
        ({"rules": [{"name": "r", "pools": ["fast"], "weights": {"fast": 1}}]}, "pools or weights, not both"),
        ({"rules": [{"name": "r", "weights": {"fast": 0}}]}, "at least one weight"),
        ({"rules": [{"name": "r", "pools": ["fast", "fast"]}]}, "named twice"),
        ({"rules": [{"name": "r", "pools": ["fast"]}] * 2}, "two rules are named 'r'"),
        ({"scorers": [{"type": "load"}, {"type": "load"}]}, "policy.scorers[1]: two scorers are named 'load'"),
        ({"rules": [{"name": "r", "pools": ["fast"], "match": {"ttft_ms": {}}}]}, "at_least, below or both"),
        (
            {"rules": [{"name": "r", "pools": ["fast"], "match": {"ttft_ms": {"at_least": 2, "below": 2}}}]},
            "at_least must be smaller than below",
        ),
        (
            {"rules": [{"name": "r", "pools": ["fast"], "match": {"headers": {"Authorization": "*"}}}]},
            "may not look at authorization",
        ),
        (
            {"rules": [{"name": "r", "pools": ["fast"], "match": {"time": [{"zone": "Mars/Base"}]}}]},
            "no time zone 'Mars/Base'",
        ),
        ({"slo_classes": {"c": {"preset": "mlperf/gpt-2"}}}, "no preset 'mlperf/gpt-2'"),
        ({"default_class": "chat"}, "policy.default_class: there is no service class 'chat'"),
        ({"tenants": {"t": {"max_class": "chat"}}}, "policy.tenants.t.max_class"),
        ({"tenants": {"t": {"trust": "clamp"}}}, "needs a max_class"),
        (
            {"slo_classes": {"c": {}}, "tenants": {"t": {"trust": "strip", "max_class": "c"}}},
            "max_class means nothing with trust: strip",
        ),
        (
            {"slo_classes": {"a": {"service_tier": "flex"}, "b": {"service_tier": "flex"}}},
            "two service classes are service_tier 'flex'",
        ),
        (
            {"tenants": {"a": {"api_key_sha256": ["0" * 64]}, "b": {"api_key_sha256": ["0" * 64]}}},
            "an API key names two tenants",
        ),
        (
            {"filters": [{"type": "label", "config": {}}]},
            "policy.filters[0].config.match: this key is required",
        ),
        ({"shadow": {"type": "slo_threshold", "config": {"fast": "x"}}}, "policy.shadow.config"),
        ({"type": "weighted", "config": {"weights": {"x": 1}}}, "weights names no pool: 'x'"),
    ],
)
def test_a_mistake_is_named_with_its_place(registry: Registry, policy: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan(registry, **policy)
    assert said in str(error.value)


def test_classes_and_tenants(registry: Registry) -> None:
    made = plan(
        registry,
        slo_classes={
            "fast": {"preset": "mlperf/llama2-70b-interactive", "tpot_ms": 20, "service_tier": "priority"},
            "batch": {"service_tier": "flex"},
            "low": {"service_tier": "default", "priority": -3},
        },
        default_class="fast",
        tenants={"a": {"api_key_sha256": ["AB" * 32], "max_class": "fast"}, "b": {"trust": "strip"}, "c": {}},
        strict=True,
    ).classes
    assert (made.default.ttft_ms, made.default.tpot_ms, made.default.priority) == (450, 20, 1)
    assert [made.classes[name].priority for name in ("batch", "low")] == [-1, -3]
    assert made.keys == {"ab" * 32: "a"}
    assert [(t.trust, t.proven) for t in made.tenants.values()] == [
        (Trust.CLAMP, True), (Trust.STRIP, False), (Trust.FULL, False),
    ]  # fmt: skip
    assert made.strict


def test_rules_become_plain_data(registry: Registry) -> None:
    rules = [
        {
            "name": "r",
            "match": {"headers": {"X-Beta": "*"}, "tpot_ms": {"below": 10}, "features": ["tools"]},
            "weights": {"general": 95, "fast": 5},
            "fallback": [],
        }
    ]
    routing = plan(registry, rules=rules, shadow={"type": "round_robin", "rules": [
        {"name": "s", "match": {"headers": {"x-shadow": "1"}}, "pools": ["fast"]}
    ]}).routing  # fmt: skip
    rule = routing.rules[0]
    assert rule.match.tpot_ms == Range(None, 10)
    assert rule.weights == (("fast", 5.0), ("general", 95.0))
    assert rule.fallback == ()
    assert routing.headers == {"x-beta", "x-shadow"}


def test_show_gives_the_options_of_every_part(registry: Registry) -> None:
    made = plan(
        registry,
        filters=[{"type": "slo_headroom", "soft": True}],
        rules=[{"name": "r", "pools": ["fast"], "scorers": [{"type": "headroom"}]}],
        shadow={"type": "round_robin", "scorers": [{"type": "prefix_affinity"}]},
    )
    shown = {path: value for path, value, _ in values(made)}
    assert shown["policy.filters[0].config.margin"] == 1.0
    assert shown["policy.filters[0].soft"] is True
    assert any(path.startswith("policy.rules[0].scorers[0].config.") for path in shown)
    assert any(path.startswith("policy.shadow.scorers[0].config.") for path in shown)
