"""The choice of a prefill instance, where engines tell what their caches hold."""

from __future__ import annotations

import random

from pdhub.api import NodeView, PoolView, RequestRecord, RequestView, Snapshot
from pdhub.policies.prefill import PrefillChoice, PrefillChoiceConfig
from pdhub.router.fleet import EVERYTHING

TOKENS = 1000


def chosen(policy: PrefillChoice, **members: object) -> str | None:
    nodes = tuple(NodeView(name, "prefill", pending_tokens=pending) for name, pending in (("a", 0), ("b", 300)))
    pool = PoolView("prefill", frozenset({"m"}), EVERYTHING, nodes, role="prefill", needs_prefill=False)
    request = RequestView("r", "m", "/v1/completions", TOKENS, prefix=(1, 2, 3, 4), **members)  # type: ignore[arg-type]
    return policy.choose(request, Snapshot(1, (pool,)), 0.0, random.Random(0)).node


def test_what_an_engine_tells_counts_in_tokens_against_the_backlog() -> None:
    policy = PrefillChoice(PrefillChoiceConfig())
    assert chosen(policy) == "a"
    assert chosen(policy, cached={"b": 0.25}) == "a"  # 300 waiting + 750 to compute
    assert chosen(policy, cached={"b": 0.5}) == "b"  # 300 waiting + 500 to compute


def test_what_was_sent_there_is_forgotten_when_the_engine_tells_otherwise() -> None:
    policy = PrefillChoice(PrefillChoiceConfig())
    policy.observe(RequestRecord("r", "m", "p", "n", "b", "", "ok", prefix=(1, 2, 3, 4)))
    assert chosen(policy) == "b"
    assert chosen(policy, cached={"b": 0.0}) == "a"
