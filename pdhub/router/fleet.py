"""All endpoints, and the frozen picture of them that policies see."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from pdhub.api.client import EngineClient, LegOrder
from pdhub.api.engine import Capabilities
from pdhub.api.errors import LayoutMismatch
from pdhub.api.policy import NodeView, PoolView, Snapshot
from pdhub.api.request import Feature
from pdhub.router.breaker import Breaker, BreakerState
from pdhub.router.endpoint import Endpoint
from pdhub.router.errors import no_endpoints

log = logging.getLogger("pdhub.router.fleet")

PREFILL_FEATURES = frozenset(
    {
        Feature.SAMPLING, Feature.TOP_K, Feature.MIN_P, Feature.PRESENCE_PENALTY, Feature.FREQUENCY_PENALTY,
        Feature.REPETITION_PENALTY, Feature.SEED, Feature.LOGIT_BIAS, Feature.LOGPROBS, Feature.PROMPT_LOGPROBS,
    }
)  # fmt: skip
"""What the first token depends on: a prefill instance must be able to do these too."""


EVERYTHING = Capabilities(frozenset(Feature), (1 << 31) - 1, 1000)
"""Of a pool that has not answered yet: it must be dropped as absent, not as incapable."""


@dataclass(slots=True)
class Pool:
    """Interchangeable nodes. ``waiting`` counts requests in its queue."""

    name: str
    client: EngineClient
    nodes: dict[str, Endpoint]
    models: frozenset[str]
    cost: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)
    capabilities: Capabilities = EVERYTHING
    waiting: int = 0

    @property
    def needs_prefill(self) -> bool:
        return self.client.order is not LegOrder.DECODE_ONLY

    def learn(self) -> None:
        """Capabilities of the pool: what every node that answered can do."""
        known = [self.client.capabilities(n.info) for n in self.nodes.values() if n.info]
        if known:
            self.capabilities = Capabilities(
                features=frozenset.intersection(*(c.features for c in known)),
                max_context=min(c.max_context for c in known),
                max_logprobs=min(c.max_logprobs for c in known),
                slots=sum(c.slots for c in known),
                cancel_within_s=max(c.cancel_within_s for c in known),
            )


@dataclass(frozen=True, slots=True)
class PrefillInfo:
    """What a prefill instance told about itself; ``capabilities`` is None for one that does not say."""

    fingerprint: str
    capabilities: Capabilities | None
    sampling_defaults: Mapping[str, float]
    eos_token_ids: frozenset[int]
    max_model_len: int


class Fleet:
    """Pools and prefill instances by name."""

    def __init__(self, pools: Collection[Pool], prefills: Collection[Endpoint], *, pair_open_s: float) -> None:
        self.pools = {pool.name: pool for pool in pools}
        self.prefills = {endpoint.name: endpoint for endpoint in prefills}
        self._pair_open_s = pair_open_s
        self._pairs: dict[tuple[str, str], Breaker] = {}
        self._version = 0
        self._snapshot: Snapshot | None = None
        self._stale_at: float | None = None

    def changed(self) -> None:
        """Something that a policy may look at changed; the next reader gets a new snapshot."""
        self._snapshot = None

    def snapshot(self, now: float) -> Snapshot:
        """The current picture; the same object until something changes."""
        if self._snapshot is None or (self._stale_at is not None and now >= self._stale_at):
            self._version += 1
            self._snapshot = Snapshot(self._version, tuple(self._view(pool, now) for pool in self.pools.values()))
            changes = [e.breaker.next_change(now) for e in self.endpoints()]
            self._stale_at = min((c for c in changes if c is not None), default=None)
        return self._snapshot

    def endpoints(self) -> Iterator[Endpoint]:
        """All of them, prefill instances first."""
        yield from self.prefills.values()
        for pool in self.pools.values():
            yield from pool.nodes.values()

    def prefill_for(
        self, pool: Pool, node: Endpoint, features: frozenset[Feature], tried: Collection[str], now: float
    ) -> Endpoint:
        """The least busy prefill instance that fits the node.

        Raises:
            LayoutMismatch: no instance writes a layout that the node takes.
            AdmissionRejected: those that do are not there now.
        """
        accepts = pool.client.accepts(node.info)
        known = [p for p in self.prefills.values() if p.info]
        fitting = [p for p in known if fits(p, accepts)]
        if known and not fitting:
            raise LayoutMismatch(f"no prefill instance writes a KV layout that pool '{pool.name}' takes")
        able = [
            p
            for p in fitting
            if p.name not in tried
            and p.usable(now)
            and _able(p, features)
            and self.pair(p.name, node.name).state(now) is not BreakerState.OPEN
        ]
        if not able:
            raise no_endpoints("no prefill instance is ready")
        return min(able, key=lambda p: (p.in_flight, p.name))

    def pair(self, prefill: str, node: str) -> Breaker:
        """Breaker of one path of KV: both ends may be well while nothing gets through between them."""
        key = (prefill, node)
        if key not in self._pairs:
            self._pairs[key] = Breaker(failures=2, open_s=self._pair_open_s, trial_s=self._pair_open_s)
        return self._pairs[key]

    def _view(self, pool: Pool, now: float) -> PoolView:
        nodes = tuple(
            NodeView(n.name, pool.name, n.health(now), n.in_flight, pool.waiting, n.load, n.labels)
            for n in pool.nodes.values()
        )
        return PoolView(
            name=pool.name,
            models=pool.models,
            capabilities=pool.capabilities,
            nodes=nodes,
            cost=pool.cost,
            needs_prefill=pool.needs_prefill,
            labels=pool.labels,
        )


def fits(prefill: Endpoint, accepts: frozenset[str]) -> bool:
    """The layouts agree, or one side does not say."""
    written = prefill.info.get("fingerprint")
    return not accepts or not written or written in accepts


def prefill_info(endpoint: Endpoint) -> PrefillInfo:
    """Typed reading of a prefill instance's last probe; members that it lacks are unknown."""
    info = endpoint.info
    raw = info.get("capabilities")
    capabilities = None
    if isinstance(raw, Mapping):
        features = frozenset(Feature(f) for f in raw.get("features", ()) if f in Feature._value2member_map_)
        capabilities = Capabilities(features, int(raw.get("max_context", 0)), int(raw.get("max_logprobs", 0)))
    return PrefillInfo(
        fingerprint=str(info.get("fingerprint", "")),
        capabilities=capabilities,
        sampling_defaults=info.get("sampling_defaults") or {},
        eos_token_ids=frozenset(info.get("eos_token_ids") or ()),
        max_model_len=int(info.get("max_model_len") or 0),
    )


def _able(prefill: Endpoint, features: frozenset[Feature]) -> bool:
    capabilities = prefill_info(prefill).capabilities
    return capabilities is None or (features & PREFILL_FEATURES) <= capabilities.features
