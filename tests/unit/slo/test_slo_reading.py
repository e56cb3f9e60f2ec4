"""Which name counts, what a class adds, who is believed."""

from __future__ import annotations

from hashlib import sha256

import pytest

from pdhub.api import SLO, Reason
from pdhub.core.slo import read_slo, served_tier
from pdhub.core.slo_classes import PRESETS, Classes, ServiceClass, Tenant, Trust
from pdhub.router.asgi import headers_of

INTERACTIVE = ServiceClass("interactive", ttft_ms=500, tpot_ms=30, priority=2, tier="priority")
CHAT = ServiceClass("chat", ttft_ms=2000, tpot_ms=100)
BATCH = ServiceClass("batch", priority=-5, tier="flex")
CLASSES = Classes(classes={c.name: c for c in (INTERACTIVE, CHAT, BATCH)})
DEFAULTED = Classes(classes=CLASSES.classes, default=CHAT)


def slo(headers=(), body=(), classes=CLASSES):
    return read_slo(dict(headers), dict(body), classes).slo


def test_the_first_present_name_wins_even_if_it_is_invalid():
    both = {"x-llm-d-slo-ttft-ms": "100", "x-slo-ttft-ms": "200", "x-slo-tpot-ms": "7"}
    assert slo(both) == SLO(ttft_ms=100.0, tpot_ms=7.0, source="header")
    reading = read_slo({**both, "x-llm-d-slo-ttft-ms": ""}, {"extra_args": {"ttft_target": 300}}, DEFAULTED)
    assert reading.slo.ttft_ms is None
    assert reading.invalid == ("x-llm-d-slo-ttft-ms",)
    assert slo() == SLO()


def test_header_then_body_then_class_then_default():
    extra = {"extra_args": {"ttft_target": 300, "itl_target": 12.5}}
    assert slo({"x-slo-ttft-ms": "9"}, extra, DEFAULTED) == SLO(9.0, 12.5, "chat", "header")
    assert slo({}, extra, DEFAULTED) == SLO(300.0, 12.5, "chat", "body")
    assert slo({"x-pdhub-slo-class": "interactive"}, {}, DEFAULTED) == SLO(500, 30, "interactive", "class")
    assert slo({"x-pdhub-slo-class": "interactive"}, {"extra_args": {"itl_target": 4}}) == SLO(
        500, 4.0, "interactive", "body"
    )
    assert slo({}, {}, DEFAULTED) == SLO(2000, 100, "chat", "default")


@pytest.mark.parametrize("null", [{"extra_args": None}, {"extra_args": {"ttft_target": None}}, {"extra_args": []}])
def test_null_is_absent(null):
    assert slo({}, null, DEFAULTED).ttft_ms == 2000


def test_an_unknown_class_is_no_class_and_does_not_fall_through():
    reading = read_slo({"x-pdhub-slo-class": "interactiv"}, {"service_tier": "priority"}, DEFAULTED)
    assert reading.slo == SLO()
    assert reading.invalid == ("x-pdhub-slo-class",)


def test_a_class_without_targets_takes_none_from_the_default():
    assert slo({"x-pdhub-slo-class": "batch"}, {}, DEFAULTED) == SLO(slo_class="batch")


@pytest.mark.parametrize(
    ("tier", "slo_class", "priority", "shown"),
    [
        ("priority", "interactive", 2, "priority"), ("flex", "batch", -5, "flex"), ("default", "chat", 0, "default"),
        ("auto", "chat", 0, "default"), ("scale", "chat", 0, "default"), (None, "chat", 0, None),
    ],
)  # fmt: skip
def test_service_tiers_name_classes(tier, slo_class, priority, shown):
    reading = read_slo({}, {"service_tier": tier}, DEFAULTED)
    assert (reading.slo.slo_class, reading.priority, reading.tier) == (slo_class, priority, shown)
    assert reading.invalid == ()


def test_a_tier_without_classes_is_importance_only():
    assert [read_slo({}, {"service_tier": t}, Classes()).priority for t in ("priority", "flex", "auto")] == [1, -1, 0]
    assert read_slo({}, {"service_tier": "flex"}, Classes()).slo == SLO()


@pytest.mark.parametrize("junk", ["platinum", "", 3, True, ["flex"], {"a": 1}])
def test_other_tiers_are_counted_and_ignored(junk):
    reading = read_slo({}, {"service_tier": junk}, DEFAULTED)
    assert (reading.tier, reading.invalid, reading.slo.slo_class) == (None, ("service_tier",), "chat")


def test_a_better_tier_that_missed_was_an_ordinary_one():
    assert served_tier("priority", Reason.SLO_MET) == "priority"
    assert served_tier("priority", Reason.SLO_LEAST_MISS) == "default"
    assert served_tier("priority", "fallback") == "default"
    assert served_tier("flex", Reason.FALLBACK) == "flex"
    assert served_tier(None, Reason.FALLBACK) is None


@pytest.mark.parametrize(
    ("headers", "body", "priority"),
    [
        ({"x-llm-d-inference-objective": "batch"}, {}, -5),
        ({"x-gateway-inference-objective": "interactive"}, {}, 2),
        ({"x-llm-d-inference-objective": "unknown"}, {}, 0),
        ({"x-smg-priority": "bulk"}, {}, -1),
        ({"x-smg-priority": "SYSTEM"}, {}, 2),
        ({"x-smg-priority": "whatever"}, {}, 0),
        ({}, {"nvext": {"agent_hints": {"priority": 7}}}, 7),
        ({}, {"nvext": {"agent_hints": {"strict_priority": 3, "priority": 7}}}, 3),
        ({}, {"priority": 7}, -7),  # vLLM: lower is sooner
        ({}, {"priority": -7}, 7),
        ({}, {"priority": -(10**30)}, 1000),
        ({}, {"priority": "7"}, 0),
        ({"x-pdhub-slo-class": "interactive"}, {}, 2),
        ({"x-pdhub-slo-class": "interactive"}, {"priority": 1}, -1),
    ],
)
def test_every_systems_priority_has_one_polarity(headers, body, priority):
    assert read_slo(headers, body, CLASSES).priority == priority


def test_an_objective_gives_its_class_where_nothing_else_does():
    headers = {"x-llm-d-inference-objective": "interactive"}
    assert read_slo(headers, {}, DEFAULTED).slo == SLO(500, 30, "interactive", "class")
    reading = read_slo({**headers, "x-pdhub-slo-class": "chat"}, {}, DEFAULTED)
    assert (reading.slo.slo_class, reading.priority, reading.objective) == ("chat", 2, "interactive")


def test_tenants_without_configuration_are_believed():
    assert read_slo({}, {}, Classes()).tenant == "default-flow"
    assert read_slo({"x-llm-d-inference-fairness-id": "a"}, {}, Classes()).tenant == "a"
    alias = {"x-gateway-inference-fairness-id": "b"}
    assert read_slo(alias, {}, Classes()).tenant == "b"
    reading = read_slo({"x-llm-d-inference-fairness-id": "a b\u00e9", **alias}, {}, Classes())
    assert (reading.tenant, reading.invalid) == ("default-flow", ("x-llm-d-inference-fairness-id",))


KEY = "sk-gold"
GUARDED = Classes(
    classes=CLASSES.classes,
    default=CHAT,
    tenants={
        "gold": Tenant("gold", Trust.CLAMP, best=INTERACTIVE, default=INTERACTIVE, proven=True),
        "silver": Tenant("silver", Trust.CLAMP, best=CHAT),
        "anonymous": Tenant("anonymous", Trust.STRIP, default=BATCH),
    },
    keys={sha256(KEY.encode()).hexdigest(): "gold"},
    default_tenant="anonymous",
)


def test_a_key_proves_its_tenant_and_a_name_does_not():
    assert read_slo({"authorization": f"Bearer {KEY}"}, {}, GUARDED).tenant == "gold"
    assert read_slo({"authorization": f"bearer  {KEY} "}, {}, GUARDED).tenant == "gold"
    assert read_slo({"x-api-key": KEY}, {}, GUARDED).tenant == "gold"
    assert read_slo({"x-api-key": KEY, "authorization": "Bearer other"}, {}, GUARDED).tenant == "anonymous"
    assert read_slo({"x-llm-d-inference-fairness-id": "gold"}, {}, GUARDED).tenant == "anonymous"
    assert read_slo({"authorization": f"Basic {KEY}"}, {}, GUARDED).tenant == "anonymous"
    assert read_slo({"x-llm-d-inference-fairness-id": "silver"}, {}, GUARDED).tenant == "silver"
    assert read_slo({"x-llm-d-inference-fairness-id": "stranger"}, {}, GUARDED).tenant == "anonymous"


def test_a_stripped_client_gets_its_default_class_whatever_it_asks():
    asks = {"x-slo-tpot-ms": "1", "x-pdhub-slo-class": "interactive", "x-smg-priority": "system"}
    reading = read_slo(asks, {"service_tier": "priority", "priority": -99}, GUARDED)
    assert (reading.slo, reading.priority, reading.tier) == (SLO(slo_class="batch"), -5, "flex")


def test_a_clamped_client_gets_at_most_its_best_class():
    silver = {"x-llm-d-inference-fairness-id": "silver"}
    tight = read_slo({**silver, "x-slo-ttft-ms": "10", "x-slo-tpot-ms": "5"}, {"priority": -9}, GUARDED)
    assert (tight.slo.ttft_ms, tight.slo.tpot_ms, tight.priority) == (2000, 100, 0)
    loose = read_slo({**silver, "x-slo-ttft-ms": "9000", "x-smg-priority": "bulk"}, {}, GUARDED)
    assert (loose.slo.ttft_ms, loose.slo.tpot_ms, loose.priority) == (9000, 100, -1)
    named = read_slo({**silver, "x-pdhub-slo-class": "interactive"}, {"service_tier": "priority"}, GUARDED)
    assert (named.slo, named.priority, named.tier) == (SLO(2000, 100, "chat", "class"), 0, "default")


def test_no_target_is_granted_that_the_best_class_does_not_have():
    only_ttft = ServiceClass("ttft", ttft_ms=100)
    classes = Classes(tenants={"t": Tenant("t", Trust.CLAMP, best=only_ttft)}, default_tenant="t")
    assert read_slo({"x-slo-tpot-ms": "5"}, {}, classes).slo == SLO()


def test_of_a_repeated_header_the_first_counts():
    raw = [(b"X-SLO-TPOT-ms", b"7"), (b"x-slo-tpot-ms", b"900"), (b"x-slo-ttft-ms", b"junk"), (b"x-slo-ttft-ms", b"5")]
    reading = read_slo(headers_of({"headers": raw}), {}, CLASSES)
    assert reading.slo == SLO(tpot_ms=7.0, source="header")
    assert reading.invalid == ("x-slo-ttft-ms",)


def test_sessions():
    assert read_slo({"x-session-id": " abc ", "x-session-token": "z"}, {}, CLASSES).session == "abc"
    assert read_slo({}, {"prompt_cache_key": "k"}, CLASSES).session == "k"
    assert read_slo({}, {"prompt_cache_key": 5}, CLASSES).session == ""
    long = read_slo({"x-session-id": "x" * 9000}, {}, CLASSES).session
    assert len(long) == 64
    assert long != read_slo({"x-session-id": "x" * 9001}, {}, CLASSES).session


def test_the_presets_are_mlperfs():
    assert PRESETS["mlperf/llama2-70b-interactive"] == (450, 40)
    assert PRESETS["mlperf/deepseek-r1-interactive"] == (1500, 15)
    assert len(PRESETS) == 11
