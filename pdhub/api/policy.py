"""The routing contract: pure, explainable choice.

``choose(request, snapshot, now, rng) -> Decision``: no I/O, no clock, no state. The snapshot is immutable and
replaced on change. What learns does so only in ``observe``; explaining a request therefore changes nothing.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from pdhub.api.engine import Capabilities, EngineLoad
from pdhub.api.request import RequestRecord, RequestView


class Health(StrEnum):
    """``STARTING`` was never ready; ``OPEN`` is a tripped breaker; ``HALF_OPEN`` may take one probe request."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    OPEN = "open"
    HALF_OPEN = "half_open"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node, frozen.

    Args:
        in_flight: the router's own count of requests on it. queued: of those that wait for its pool.
        load: the engine's last word; unknown when older than the host's staleness bound.
        slots: requests that it runs at once; 0 = unknown.
        pending_tokens: prompt tokens sent to it and not yet answered (for a prefill instance: its backlog).
        remaining_tokens: output tokens that its running requests may still produce, as far as the router knows.
        tightest_tpot_ms: the smallest TPOT target among the requests on it; None if nobody there has one. A node
            whose TPOT grows with every request must not be filled beyond that.
    """

    name: str
    pool: str
    health: Health = Health.READY
    in_flight: int = 0
    queued: int = 0
    load: EngineLoad = EngineLoad()
    labels: Mapping[str, str] = field(default_factory=dict)
    slots: int = 0
    pending_tokens: int = 0
    remaining_tokens: int | None = None
    tightest_tpot_ms: float | None = None


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool, frozen. ``cost`` is relative: lower is cheaper. ``role`` is ``decode`` or ``prefill``."""

    name: str
    models: frozenset[str]
    capabilities: Capabilities
    nodes: tuple[NodeView, ...]
    role: str = "decode"
    cost: float = 1.0
    needs_prefill: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)


class Prediction(NamedTuple):
    """What a request would see on a node, in milliseconds; None = unknown (which is neither good nor bad).

    A named tuple, because one is made for each node of each choice: a frozen dataclass takes twice as long to make.

    Args:
        ttft_ms: from now to the first token, waiting included.
        tpot_ms: per output token.
        wait_ms: the part of ``ttft_ms`` that is waiting for a place.
        turn_ms: the part of it before the prompt is sent to a prefill instance, in a line where the more important go
            first.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    wait_ms: float | None = None
    turn_ms: float = 0.0


class Predictor(Protocol):
    """A frozen latency model: same arguments, same answer. Part of a snapshot."""

    def predict(self, request: RequestView, pool: PoolView, node: NodeView, now: float) -> Prediction:
        """Cheap: called for each candidate of each request. Stale knowledge counts as unknown."""
        ...


class NothingKnown:
    """A predictor without knowledge."""

    def predict(self, request: RequestView, pool: PoolView, node: NodeView, now: float) -> Prediction:
        return Prediction()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a choice may depend on. ``version`` grows with every change."""

    version: int
    pools: tuple[PoolView, ...]
    latency: Predictor = field(default_factory=NothingKnown)


class Reason(StrEnum):
    """Why a decision came out as it did; a closed set."""

    SLO_MET = "slo-met"
    SLO_LEAST_MISS = "slo-least-miss"
    #: nothing is known that speaks for or against attaining the targets
    SLO_UNKNOWN = "slo-unknown"
    #: a node of which nothing is known gets its chance though another is known to attain
    EXPLORE = "explore"
    NO_SLO = "no-slo"
    TPOT_BELOW_THRESHOLD = "tpot-below-threshold"
    RULE = "rule"
    WEIGHT = "weight"
    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"
    SCORED = "scored"
    ONLY_CANDIDATE = "only-candidate"
    FALLBACK = "fallback"
    SPILL = "spill"
    NO_CAPABLE_POOL = "no-capable-pool"
    NO_HEALTHY_NODE = "no-healthy-node"
    #: rules and filters left nobody
    FILTERED = "filtered"
    SHED = "shed"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One node's fate: kept with scores, or dropped by a filter that says why. Each node occurs once."""

    pool: str
    node: str
    dropped_by: str | None = None
    why: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)
    predicted: Prediction | None = None

    @property
    def kept(self) -> bool:
        return self.dropped_by is None


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome. ``order`` are the kept nodes, best first: (pool, node); the first is chosen, the others
    are where a retry goes. Empty if nothing can take the request (then ``reason`` says why).

    Args:
        candidates: each node of the snapshot once; a sequence that may be made when it is first read.
        policy: the policy that decided. rule: the rule that matched, if any.
    """

    order: tuple[tuple[str, str], ...]
    candidates: Sequence[Candidate]
    reason: Reason
    policy: str
    rule: str | None = None

    @property
    def pool(self) -> str | None:
        return self.order[0][0] if self.order else None

    @property
    def node(self) -> str | None:
        return self.order[0][1] if self.order else None


class Policy(ABC):
    """Chooses among all nodes. Pure: same arguments, same decision; permuting the nodes changes nothing."""

    @abstractmethod
    def choose(self, request: RequestView, snapshot: Snapshot, now: float, rng: random.Random) -> Decision:
        """Every node of the snapshot occurs exactly once in ``candidates``. Never raises for a request."""

    def observe(self, record: RequestRecord) -> None:
        """How a request ended; the only place where a policy may change. Default: nothing."""


class Filter(ABC):
    """Drops candidates."""

    @abstractmethod
    def drop(self, request: RequestView, pool: PoolView, node: NodeView, now: float) -> str | None:
        """Why this node cannot take the request; None keeps it. Pure."""

    def using(self, latency: Predictor) -> Filter:
        """The filter to ask for one choice; called once before its :meth:`drop` calls. Override it to filter by
        predictions: return an object that holds ``latency``. Default: this filter itself."""
        return self


class Scorer(ABC):
    """Rates candidates."""

    @abstractmethod
    def score(self, request: RequestView, nodes: Sequence[tuple[PoolView, NodeView]], now: float) -> Sequence[float]:
        """One number between 0 (worst) and 1 (best) a node, in the given order. Pure."""

    def using(self, latency: Predictor) -> Scorer:
        """As :meth:`Filter.using`; :meth:`observe` is called on the scorer itself."""
        return self

    def observe(self, record: RequestRecord) -> None:
        """As :meth:`Policy.observe`."""


class AdmissionOrder(ABC):
    """Who of those that wait in front of a pool enters next, and who may be refused for another."""

    @abstractmethod
    def rank(self, request: RequestView, deadline: float, now: float) -> tuple[float, ...]:
        """Smaller enters earlier. Pure; asked once, before the request waits for the first time.

        The first number is a band: a smaller band enters first as a whole, and within a band the tenants take turns.
        The other numbers order the requests of one tenant. At least one number; NaN counts as infinite.

        Args:
            deadline: monotonic seconds at which its TTFT budget ends.
        """

    def sheddable(self, request: RequestView) -> bool:
        """May it be refused in favour of another? Default: only negative priority."""
        return request.priority < 0
