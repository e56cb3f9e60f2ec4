"""What counts as another policy, and what only a restart can change."""

from pdhub.config.models import Config
from pdhub.config.version import version_of
from pdhub.router.reload import fixed_changes

BASE = {
    "model": {"name": "m"},
    "pools": [
        {
            "name": "a",
            "engine": {"type": "openai"},
            "nodes": [{"name": "a-0", "port": 1, "launch": False}, {"name": "a-1", "port": 2, "launch": False}],
        }
    ],
    "policy": {"type": "slo", "slo_classes": {"x": {"tpot_ms": 10}, "y": {"tpot_ms": 20}}},
}


def config(**sections):
    return Config.model_validate({**BASE, **sections})


def test_a_version_goes_by_content_not_by_spelling():
    base = version_of(config())
    other_order = {"slo_classes": {"y": {"tpot_ms": 20.0}, "x": {"tpot_ms": 10}}, "type": "slo", "strict": False}
    assert version_of(config(policy=other_order)) == base
    assert version_of(config(router={"port": 9})) == base
    assert version_of(config(policy={"type": "slo"})) != base
    assert version_of(config(admission={"queue_limit": 3})) != base


def test_the_order_of_rules_is_content():
    one, two = ({"name": name, "pools": ["a"]} for name in ("one", "two"))
    versions = {version_of(config(policy={"type": "slo", "rules": rules})) for rules in ([one, two], [two, one])}
    assert len(versions) == 2


def test_policy_and_admission_may_change():
    assert list(fixed_changes(config(), config(policy={"type": "round_robin"}, admission={"queue_limit": 1}))) == []


def test_everything_else_is_named_by_its_path():
    pools = [dict(BASE["pools"][0])]
    pools[0]["cost"] = 3
    pools[0]["nodes"] = [pools[0]["nodes"][0], {**pools[0]["nodes"][1], "port": 7}]
    assert list(fixed_changes(config(), config(pools=pools, router={"port": 1}))) == [
        "router.port", "pools[0].nodes[1].port", "pools[0].cost",
    ]  # fmt: skip
    fewer = [{**BASE["pools"][0], "nodes": BASE["pools"][0]["nodes"][:1]}]
    assert list(fixed_changes(config(), config(pools=fewer))) == ["pools[0].nodes"]
