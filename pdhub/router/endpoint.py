"""One configured node or prefill instance, as the router sees it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from pdhub.api.client import Target
from pdhub.api.engine import EngineLoad
from pdhub.api.policy import Health
from pdhub.router.breaker import Breaker, BreakerState
from pdhub.router.handovers import Handovers

if TYPE_CHECKING:
    from pdhub.router.stay import Stay


class Endpoint:
    """Mutable state of one endpoint; keyed by name, it survives every refresh of what is known about it.

    Args:
        hosted: served by `pdhub node`, whose probes answer even while the engine computes. Silence of such an
            endpoint on every channel means that it is gone; a foreign server may merely be busy.
        config: its engine's options. role: ``decode`` or ``prefill``.
        serves: of a prefill instance, the pools that it computes prompts for; empty = all.
        probe_failures: probes in a row that must fail before an idle endpoint is down.

    ``writes`` is what a prefill instance hands over (layouts, connectors), ``learned`` what clients want to know again.
    ``reads`` takes the load out of an answer's headers, where the engine tells it there.
    ``owed`` are writes that prefill is still to make there for requests that are gone. ``retiring`` is why it gets no
    new requests though it could serve, for people; empty = it does.
    ``pending_tokens`` are prompt tokens sent to it and not yet answered, ``slots`` what it runs at once (0 = unknown).
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        breaker: Breaker,
        probe_failures: int,
        hosted: bool,
        api_key: str | None = None,
        labels: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        role: str = "decode",
        serves: Collection[str] = (),
    ) -> None:
        self.name = name
        self.url = url
        self.api_key = api_key
        self.hosted = hosted
        self.labels = labels or {}
        self.serves = frozenset(serves)
        self.breaker = breaker
        self.in_flight = 0
        self.slots = 0
        self.pending_tokens = 0
        self.stays: dict[str, Stay] = {}
        self.handovers = Handovers()
        self.load = EngineLoad()
        self.load_at = 0.0
        self.reads: Callable[[Mapping[str, str]], EngineLoad | None] = lambda headers: None
        self.info: Mapping[str, Any] = {}
        self.learned: Mapping[str, Any] = {}
        self.writes: frozenset[str] = frozenset()
        self.gone = False
        self.owed = 0
        self.draining = False
        self.retiring = ""
        self.problem = "has not answered yet"
        self.role = role
        self.config = config or {}
        self._probe_failures = probe_failures
        self._known = False
        self._misses = 0
        self._last_seen = 0.0
        self._area = 0.0
        self._area_at = 0.0

    def count(self, change: int, now: float) -> None:
        """So many requests came (or left, if negative)."""
        self._area = self.area(now)
        self._area_at = now
        self.in_flight += change

    def area(self, now: float) -> float:
        """Requests in flight, integrated over time; the difference of two moments gives the mean between them."""
        return self._area + self.in_flight * (now - self._area_at)

    def told(self, load: EngineLoad, now: float) -> None:
        """The engine's word about its load."""
        self.load, self.load_at = load, now

    def heard(self, headers: Mapping[str, str], now: float) -> None:
        """An answer's headers: what they tell of the load is newer than the last probe's word."""
        if (told := self.reads(headers)) is not None:
            known = {f.name: value for f in fields(told) if (value := getattr(told, f.name)) is not None}
            self.told(replace(self.load, **known), now)

    def target(self) -> Target:
        """What an engine client may know of it."""
        return Target(self.name, self.url, self.info, self.config, self.learned, self.role)

    def learn(self, told: Mapping[str, Any]) -> None:
        """What a client wants to know again at the next attempt."""
        if told:
            self.learned = {**self.learned, **told}

    def health(self, now: float) -> Health:
        if not self._known:
            return Health.STARTING
        if self.draining or self.retiring:
            return Health.DRAINING
        if self._misses >= self._probe_failures:
            return Health.DOWN
        state = self.breaker.state(now)
        if state is BreakerState.CLOSED:
            return Health.READY
        return Health.HALF_OPEN if state is BreakerState.HALF_OPEN else Health.OPEN

    def usable(self, now: float) -> bool:
        """A request may be sent there now."""
        return self.health(now) in (Health.READY, Health.HALF_OPEN)

    def answered(self, info: Mapping[str, Any], now: float) -> None:
        """A probe was answered well."""
        self.info = info
        self.draining = self.gone = False
        self.problem = ""
        self._known = True
        self.served(now)

    def missed(self, problem: str, *, gone: bool = False) -> None:
        """A probe failed. ``gone``: nobody listens there; what was learned of whoever did is void."""
        self.problem = problem
        self.gone = gone
        self.learned = {}
        self._misses += 1

    def seen(self, now: float) -> None:
        """Any sign of life, be it a refusal."""
        self._last_seen = now

    def served(self, now: float) -> None:
        """Bytes of an answer came. That counts as much as a probe: an endpoint too busy for probes is not dead."""
        self._misses = 0
        self._last_seen = now

    def silent(self, now: float, limit_s: float) -> bool:
        """Hosted, and nothing was heard on any channel for ``limit_s``."""
        return self.hosted and self._misses > 0 and now - self._last_seen > limit_s
