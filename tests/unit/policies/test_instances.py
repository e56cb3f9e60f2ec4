"""What a policy keeps of the one that it replaces."""

from __future__ import annotations

from pdhub.api.plugin import PolicySpec
from pdhub.policies.affinity import PrefixAffinityConfig, PrefixAffinityScorer
from pdhub.policies.instances import Instances
from pdhub.policies.routing import Part

SPEC = PolicySpec(name="x", summary="", config=PrefixAffinityConfig, factory=PrefixAffinityScorer)


def part(entries: int = 10, weight: float = 1.0) -> Part:
    return Part("x", SPEC, PrefixAffinityConfig(entries=entries), weight)


def test_the_same_options_keep_the_instance() -> None:
    old = Instances()
    kept, gone = old.make(part(10)), old.make(part(20))
    new = Instances(old)
    assert new.make(part(30)) not in (kept, gone)
    assert new.make(part(10, weight=5.0)) is kept


def test_an_instance_serves_one_place_only() -> None:
    old = Instances()
    first, second = old.make(part()), old.make(part())
    assert first is not second
    new = Instances(old)
    made = [new.make(part()) for _ in range(3)]
    assert made[:2] == [first, second]
    assert made[2] not in (first, second)


def test_it_is_handed_on_from_reload_to_reload() -> None:
    instances = Instances()
    first = instances.make(part())
    for _ in range(5):
        instances = Instances(instances)
        assert instances.make(part()) is first


def test_what_is_taken_out_is_forgotten() -> None:
    old = Instances()
    first = old.make(part())
    between = Instances(old)
    assert Instances(between).make(part()) is not first
