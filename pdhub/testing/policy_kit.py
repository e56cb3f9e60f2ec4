"""The conformance kit for routing policies. Subclass, override :meth:`policy`::

class TestMine(PolicyConformance):
    @pytest.fixture
    def policy(self):
        return MyPolicy(MyConfig(...))
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from pdhub.api import (
    SLO,
    Capabilities,
    Decision,
    EngineLoad,
    Feature,
    Health,
    NodeView,
    Policy,
    PoolView,
    Prediction,
    Reason,
    RequestRecord,
    RequestView,
    Snapshot,
)
from pdhub.testing.effects import effects

MODEL = "m"


def make_pool(name: str, nodes: int, *, features: frozenset[Feature] = frozenset(), context: int = 4096) -> PoolView:
    """A healthy pool with ``nodes`` nodes whose loads differ."""
    return PoolView(
        name=name,
        models=frozenset({MODEL}),
        capabilities=Capabilities(features, context, 0, 4),
        nodes=tuple(
            NodeView(f"{name}-{n}", name, in_flight=n % 3, load=EngineLoad(running=n % 3)) for n in range(nodes)
        ),
    )


class FixedLatency:
    """A predictor for tests: what it is told, by pool or by (pool, node); nothing of all others."""

    def __init__(self, known: Mapping[str | tuple[str, str], Prediction]) -> None:
        self._known = dict(known)

    def predict(self, request: RequestView, pool: PoolView, node: NodeView, now: float) -> Prediction:
        return self._known.get((pool.name, node.name)) or self._known.get(pool.name) or Prediction()


def make_latency(pools: Sequence[str]) -> FixedLatency:
    """The first pool attains tight targets, the others loose ones; of every second node nothing is known."""
    known: dict[str | tuple[str, str], Prediction] = {}
    for place, pool in enumerate(pools):
        tpot = 4.0 if place == 0 else 20.0
        known |= {(pool, f"{pool}-{n}"): Prediction(40.0 + n, tpot + n, 0.0) for n in (0, 2)}
    return FixedLatency(known)


def make_requests() -> list[RequestView]:
    """Requests that differ in everything a policy may look at."""
    slos = [SLO(), SLO(tpot_ms=5.0), SLO(tpot_ms=500.0), SLO(ttft_ms=50.0), SLO(ttft_ms=1.0, tpot_ms=1.0)]
    features = [frozenset[Feature](), frozenset({Feature.SEED}), frozenset({Feature.GRAMMAR})]
    return [
        RequestView(
            id=f"r{n}",
            model=MODEL,
            endpoint="/v1/completions",
            prompt_tokens=10 ** (n % 5),
            max_tokens=None if n % 2 else 64,
            features=features[n % 3],
            slo=slos[n % 5],
            priority=n % 3 - 1,
            tenant=f"t{n % 2}",
            headers={"x-slo-tpot-ms": "5"} if n % 5 == 1 else {},
        )
        for n in range(30)
    ]


class PolicyConformance:
    """Rules for policies; pools are named ``fast`` and ``general`` unless :meth:`pool_names` says otherwise."""

    @pytest.fixture
    def policy(self) -> Policy:
        raise NotImplementedError("override the `policy` fixture with an instance of your policy")

    @pytest.fixture
    def pool_names(self) -> Sequence[str]:
        """Pools that the policy's configuration names; at least two."""
        return ("fast", "general")

    @pytest.fixture
    def snapshot(self, pool_names: Sequence[str]) -> Snapshot:
        seed = frozenset({Feature.SEED})
        return Snapshot(
            1,
            tuple(make_pool(n, 4, features=seed if i else frozenset()) for i, n in enumerate(pool_names)),
            make_latency(pool_names),
        )

    def test_R01_same_inputs_same_decision(self, policy: Policy, snapshot: Snapshot) -> None:
        """Explain would lie if a second look gave another answer."""
        for request in make_requests():
            assert _choose(policy, request, snapshot) == _choose(policy, request, snapshot)

    def test_R02_order_of_nodes_changes_nothing(self, policy: Policy, snapshot: Snapshot) -> None:
        """A hidden preference for the first node herds all routers onto it."""
        pools = tuple(replace(p, nodes=p.nodes[::-1]) for p in reversed(snapshot.pools))
        shuffled = replace(snapshot, pools=pools)
        for request in make_requests():
            one, two = _choose(policy, request, snapshot), _choose(policy, request, shuffled)
            assert (one.order, one.reason) == (two.order, two.reason)

    def test_R03_every_node_occurs_once(self, policy: Policy, snapshot: Snapshot) -> None:
        """A node that is missing from the explanation cannot be debugged."""
        nodes = sorted((p.name, n.name) for p in snapshot.pools for n in p.nodes)
        for request in make_requests():
            decision = _choose(policy, request, snapshot)
            assert sorted((c.pool, c.node) for c in decision.candidates) == nodes

    def test_R04_only_kept_nodes_are_chosen(self, policy: Policy, snapshot: Snapshot) -> None:
        """The order is what retries follow; a dropped node in it gets traffic it cannot serve."""
        for request in make_requests():
            decision = _choose(policy, request, snapshot)
            kept = {(c.pool, c.node) for c in decision.candidates if c.kept}
            assert set(decision.order) <= kept
            assert len(set(decision.order)) == len(decision.order)
            assert all(c.why or c.kept for c in decision.candidates), "a dropped node says why"
            assert isinstance(decision.reason, Reason), f"{decision.reason!r} is no Reason; the set is closed"

    def test_R05_incapable_pools_are_never_chosen(self, policy: Policy, snapshot: Snapshot) -> None:
        """A capability gap drops a candidate; the request goes to a pool that can, or gets one clear reason."""
        for request in make_requests():
            decision = _choose(policy, request, snapshot)
            pools = {p.name: p for p in snapshot.pools}
            for pool, _ in decision.order:
                assert request.features <= pools[pool].capabilities.features
                assert request.prompt_tokens < pools[pool].capabilities.max_context
            if any(
                request.features <= p.capabilities.features and request.prompt_tokens < 4000 for p in pools.values()
            ):
                shed = decision.reason is Reason.SHED and request.priority < 0
                assert decision.order or shed, f"a capable pool exists, but: {decision.reason}"

    @pytest.mark.parametrize("health", [Health.DOWN, Health.OPEN, Health.DRAINING, Health.STARTING], ids=str)
    def test_R06_unhealthy_nodes_are_never_chosen(self, policy: Policy, snapshot: Snapshot, health: Health) -> None:
        """Nor are they forgotten: the reason says that nobody is there."""
        sick = {p.nodes[0].name for p in snapshot.pools}
        some = _with_health(snapshot, health, sick)
        none = _with_health(snapshot, health, {n.name for p in snapshot.pools for n in p.nodes})
        for request in make_requests():
            assert not {n for _, n in _choose(policy, request, some).order} & sick
            decision = _choose(policy, request, none)
            assert decision.order == ()
            assert decision.reason in (Reason.NO_HEALTHY_NODE, Reason.NO_CAPABLE_POOL, Reason.SHED)

    def test_R07_a_foreign_model_has_no_pool(self, policy: Policy, snapshot: Snapshot) -> None:
        """Another model's pool would answer, wrongly."""
        decision = _choose(policy, replace(make_requests()[0], model="other"), snapshot)
        assert decision.order == ()

    def test_R08_an_empty_fleet_is_no_error(self, policy: Policy) -> None:
        """The router must answer 503, not 500, while everything restarts."""
        decision = _choose(policy, make_requests()[0], Snapshot(1, ()))
        assert decision.order == ()
        assert decision.pool is None
        assert decision.node is None

    def test_R09_choosing_changes_nothing(self, policy: Policy, snapshot: Snapshot) -> None:
        """State changes only in ``observe``; explaining a request is free of effects."""
        first = [_choose(policy, r, snapshot) for r in make_requests()]
        for request in make_requests():
            _choose(policy, request, snapshot)
        assert [_choose(policy, r, snapshot) for r in make_requests()] == first

    def test_R10_observe_takes_any_record(self, policy: Policy, snapshot: Snapshot) -> None:
        """Records of failed and cancelled requests have holes."""
        policy.observe(RequestRecord("r", MODEL, None, None, None, "no-slo", "error", error_code="engine_failed"))
        policy.observe(RequestRecord("r", MODEL, "gone", "gone-1", None, "no-slo", "ok", ttft_ms=1.0, tpot_ms=1.0))
        assert _choose(policy, make_requests()[0], snapshot).order

    def test_R11_an_explanation_stays_what_it_was(self, policy: Policy, snapshot: Snapshot) -> None:
        """It may be made when it is first read, but from nothing that has changed since."""
        for request in make_requests():
            read, unread = _choose(policy, request, snapshot), _choose(policy, request, snapshot)
            before = list(read.candidates)
            for n in range(3):
                policy.observe(
                    RequestRecord(
                        f"x{n}", MODEL, *_place(snapshot), None, "no-slo", "ok", ttft_ms=9.0, tpot_ms=9.0, prefix=(n,)
                    )
                )
            assert list(unread.candidates) == before

    def test_R12_only_sheddable_requests_are_shed(self, policy: Policy, snapshot: Snapshot) -> None:
        """Late is better than never for everybody else: a prediction may be wrong."""
        hopeless = FixedLatency({pool.name: Prediction(1e6, 1e6, 1e6) for pool in snapshot.pools})
        for request in make_requests():
            decision = _choose(
                policy, replace(request, features=frozenset(), prompt_tokens=10), _seen(snapshot, hopeless)
            )
            assert decision.order or (request.priority < 0 and decision.reason is Reason.SHED)

    def test_R13_unknown_is_no_obstacle(self, policy: Policy, snapshot: Snapshot) -> None:
        """At start nothing is known, and nothing would ever be if unknown nodes were left out."""
        splendid = FixedLatency({pool.name: Prediction(1e-3, 1e-3, 0.0) for pool in snapshot.pools})
        for request in make_requests():
            unknown = _choose(policy, request, _seen(snapshot, FixedLatency({})))
            assert set(unknown.order) >= set(_choose(policy, request, _seen(snapshot, splendid)).order)

    def test_R14_choosing_touches_nothing_outside(self, policy: Policy, snapshot: Snapshot) -> None:
        """It runs on the router's event loop: a file, a socket or a pause there stops every request."""
        for request in make_requests():
            list(_choose(policy, request, snapshot).candidates)  # what is imported late has been
            with effects() as seen:
                list(_choose(policy, request, snapshot).candidates)
            assert not seen, f"while choosing: {', '.join(seen)}"


def _choose(policy: Policy, request: RequestView, snapshot: Snapshot) -> Decision:
    return policy.choose(request, snapshot, 100.0, random.Random(1))


def _with_health(snapshot: Snapshot, health: Health, names: set[str]) -> Snapshot:
    pools = tuple(
        replace(p, nodes=tuple(replace(n, health=health) if n.name in names else n for n in p.nodes))
        for p in snapshot.pools
    )
    return replace(snapshot, version=snapshot.version + 1, pools=pools)


def _seen(snapshot: Snapshot, latency: FixedLatency) -> Snapshot:
    return replace(snapshot, version=snapshot.version + 1, latency=latency)


def _place(snapshot: Snapshot) -> tuple[str, str]:
    pool = snapshot.pools[0]
    return pool.name, pool.nodes[0].name
