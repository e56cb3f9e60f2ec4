"""All endpoints, and the frozen picture of them that policies see."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdhub.api.client import EngineClient, LegOrder
from pdhub.api.engine import Capabilities
from pdhub.api.errors import LayoutMismatch, Unsupported
from pdhub.api.policy import Prediction, Snapshot
from pdhub.api.request import Feature, RequestView
from pdhub.core.latency import LatencyModel
from pdhub.core.turns import Backlog
from pdhub.policies.capable import beyond
from pdhub.router.breaker import Breaker, BreakerState
from pdhub.router.endpoint import Endpoint
from pdhub.router.errors import no_endpoints
from pdhub.router.handed import told_by
from pdhub.router.pairs import Pairs
from pdhub.router.picture import Picture
from pdhub.wire.capabilities import heard
from pdhub.wire.http import CapabilitiesBody

log = logging.getLogger("pdhub.router.fleet")

PREFILL_FEATURES = frozenset(
    {
        Feature.SAMPLING, Feature.TOP_K, Feature.MIN_P, Feature.PRESENCE_PENALTY, Feature.FREQUENCY_PENALTY,
        Feature.REPETITION_PENALTY, Feature.SEED, Feature.LOGIT_BIAS, Feature.LOGPROBS, Feature.PROMPT_LOGPROBS,
        Feature.MIN_TOKENS,
    }
)  # fmt: skip
"""What the first token depends on: a prefill instance must be able to do these too."""


EVERYTHING = Capabilities(frozenset(Feature), (1 << 31) - 1, 1000)
"""Of a pool that has not answered yet: it must be dropped as absent, not as incapable."""


@dataclass(slots=True)
class Pool:
    """Interchangeable nodes. ``lends``: what a pool that speaks tokens can do because of the router."""

    name: str
    client: EngineClient
    nodes: dict[str, Endpoint]
    models: frozenset[str]
    cost: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)
    capabilities: Capabilities = EVERYTHING
    lends: Callable[[], frozenset[Feature]] = frozenset

    @property
    def needs_prefill(self) -> bool:
        return self.client.order is not LegOrder.DECODE_ONLY

    def learn(self) -> None:
        """Capabilities of the pool: what every node that answered can do."""
        known = []
        for node in self.nodes.values():
            if node.info:
                known.append(self.client.capabilities(node.info))
                node.slots = known[-1].slots
        if known:
            self.capabilities = Capabilities(
                features=frozenset.intersection(*(c.features for c in known)) | self._lent(),
                max_context=min(c.max_context for c in known),
                max_logprobs=min(c.max_logprobs for c in known),
                slots=sum(c.slots for c in known),
                cancel_within_s=max(c.cancel_within_s for c in known),
                max_top_k=min((c.max_top_k for c in known if c.max_top_k is not None), default=None),
                logprobs_from=max(c.logprobs_from for c in known),
            )

    def _lent(self) -> frozenset[Feature]:
        return self.lends() if self.client.speaks_tokens else frozenset()


@dataclass(frozen=True, slots=True)
class PrefillInfo:
    """What a prefill instance told about itself; ``capabilities`` is None for one that does not say."""

    fingerprint: str
    capabilities: Capabilities | None
    sampling_defaults: Mapping[str, float]
    eos_token_ids: frozenset[int]
    max_model_len: int


class Fleet:
    """Pools and prefill instances by name.

    Args:
        pair_open_s: how long a path of KV that failed stays out.
        latency: what is known of latencies. load_stale_s: how long an engine's word about its load counts.
        waiting: now: requests in each pool's queue.
    """

    def __init__(
        self,
        pools: Collection[Pool],
        prefills: Collection[Endpoint],
        *,
        pair_open_s: float,
        latency: LatencyModel,
        load_stale_s: float,
        waiting: Callable[[], Mapping[str, int]],
    ) -> None:
        self.pools = {pool.name: pool for pool in pools}
        self.prefills = {endpoint.name: endpoint for endpoint in prefills}
        self._pair_open_s = pair_open_s
        self._pairs: dict[tuple[str, str], Breaker] = {}
        self.pairs = Pairs()
        self.latency = latency
        self._picture = Picture(self.pools, self.prefills, latency, load_stale_s, waiting)

    def untaught(self) -> Fleet:
        """The same endpoints, for requests of the router's own: nothing is learned from how long they take."""
        fleet = copy.copy(self)
        fleet.latency = LatencyModel()
        return fleet

    def changed(self, *endpoints: Endpoint) -> None:
        """Something that a policy may look at changed, of these or (if none is given) of any; the next reader gets a
        new snapshot."""
        self._picture.changed(endpoints)

    def moved(self, endpoint: Endpoint) -> None:
        """Tokens came from it."""
        self._picture.moved(endpoint)

    def snapshot(
        self,
        now: float,
        inside: str | None = None,
        ahead: Mapping[str, int] | None = None,
        backlog: Backlog | None = None,
    ) -> Snapshot:
        """The current picture; the same object until something changes. ``inside``: a pool that has let the request
        in, so that nobody who waits there is ahead of it; ``ahead``: how many are, elsewhere (None = all); ``backlog``:
        what it would have in front of it at a prefill instance (None = what was sent there)."""
        return self._picture.snapshot(now, inside, ahead, backlog)

    def predict(self, request: RequestView, pool: str, node: str, now: float) -> Prediction:
        """What a request that need not wait in the pool's queue would see there."""
        snapshot = self.snapshot(now, pool)
        view = next(p for p in snapshot.pools if p.name == pool)
        seen = next(n for n in view.nodes if n.name == node)
        return snapshot.latency.predict(request, view, seen, now)

    def endpoints(self) -> Iterator[Endpoint]:
        """All of them, prefill instances first."""
        yield from self.prefills.values()
        for pool in self.pools.values():
            yield from pool.nodes.values()

    def prefills_of(self, pool: str) -> list[Endpoint]:
        """Instances that may compute the pool's prompts, as the configuration says."""
        return [p for p in self.prefills.values() if not p.serves or pool in p.serves]

    def able_prefills(
        self, pool: Pool, node: Endpoint, request: RequestView, tried: Collection[str], now: float
    ) -> list[Endpoint]:
        """The prefill instances that fit the node and can be used now; at least one.

        Raises:
            LayoutMismatch: no instance writes a layout that the node takes.
            Unsupported: none of them can do what the request asks for.
            AdmissionRejected: those that can are not there now.
        """
        accepts = pool.client.accepts(node.info)
        configured = self.prefills_of(pool.name)
        known = [p for p in configured if p.info]
        fitting = [p for p in known if fits(p, accepts)]
        if known and not fitting:
            raise LayoutMismatch(f"no prefill instance writes a KV layout that pool '{pool.name}' takes")
        lacks = {p.name: _lack(p, request) for p in fitting}
        lacking = [lack for lack in lacks.values() if lack is not None]
        if lacking and len(lacking) == len(fitting) and len(known) == len(configured):
            member, why = lacking[0]
            raise Unsupported(f"{member}: no prefill instance can serve this request ({why})", param=member)
        able = [
            p
            for p in fitting
            if p.name not in tried
            and p.usable(now)
            and lacks[p.name] is None
            and self.pair(p.name, node.name).state(now) is not BreakerState.OPEN
            and not self.pairs.held(p.name, node.name)
        ]
        if not able:
            raise no_endpoints("no prefill instance is ready")
        return able

    def pair(self, prefill: str, node: str) -> Breaker:
        """Breaker of one path of KV: both ends may be well while nothing gets through between them."""
        key = (prefill, node)
        if key not in self._pairs:
            self._pairs[key] = Breaker(failures=2, open_s=self._pair_open_s, trial_s=self._pair_open_s)
        return self._pairs[key]


def fits(prefill: Endpoint, accepts: frozenset[str]) -> bool:
    """The layouts agree, or one side does not say."""
    return not accepts or not prefill.writes or not accepts.isdisjoint(prefill.writes)


def prefill_info(endpoint: Endpoint) -> PrefillInfo:
    """Typed reading of a prefill instance's last probe; members that it lacks are unknown."""
    info = told_by(endpoint.info)
    return PrefillInfo(
        fingerprint=str(info.get("fingerprint", "")),
        capabilities=_told(info.get("capabilities")),
        sampling_defaults=info.get("sampling_defaults") or {},
        eos_token_ids=frozenset(info.get("eos_token_ids") or ()),
        max_model_len=int(info.get("max_model_len") or 0),
    )


def sampling_defaults(fleet: Fleet) -> dict[str, float]:
    """The model's, as the first prefill instance that answered tells them."""
    for endpoint in fleet.prefills.values():
        if endpoint.info:
            return dict(prefill_info(endpoint).sampling_defaults)
    return {}


def _told(raw: Any) -> Capabilities | None:
    try:
        return heard(msgspec.convert(raw, CapabilitiesBody)) if isinstance(raw, Mapping) else None
    except msgspec.ValidationError:
        return None


def _lack(prefill: Endpoint, request: RequestView) -> tuple[str, str] | None:
    """What an instance cannot do for the first token of this request, as (member, why); None if it can, or does not
    say."""
    capabilities = prefill_info(prefill).capabilities
    if capabilities is None:
        return None
    if missing := sorted((request.features & PREFILL_FEATURES) - capabilities.features):
        member = "temperature" if missing[0] is Feature.SAMPLING else missing[0].value
        return member, "cannot do " + ", ".join(missing)
    return beyond(request, capabilities)
