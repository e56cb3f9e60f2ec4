"""What is known about one request while it runs; becomes its record when it ended."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdhub.api.policy import Decision, Prediction
from pdhub.api.request import SLO, RequestRecord
from pdhub.core.gaps import Gaps
from pdhub.core.slo import SloReading, served_tier
from pdhub.router.rulebook import Rulebook
from pdhub.telemetry.decisions import Entry

if TYPE_CHECKING:
    from pdhub.router.stay import Stay

PROMPT: Final = "prompt_tokens"
COMPLETION: Final = "completion_tokens"

_UNSAFE = re.compile(r"[^A-Za-z0-9._:/+=@-]")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,200})?")


def new_id() -> str:
    """A request's or a transfer's id: unique and unguessable."""
    return secrets.token_hex(16)


def safe_id(text: str) -> str:
    """A client's request id, fit for a header and a log line; empty if nothing is left of it."""
    return _UNSAFE.sub("", text)[:128]


@dataclass(slots=True)
class Flight:
    """Times are seconds of one monotonic clock.

    Args:
        id: minted by the router, the key everywhere. client_id: what the client sent; echoed and logged only.
        trace: W3C trace headers for both legs.
        sent_at: of the last attempt, to its node. prefill_sent_at, prefilled_at: its prefill call, and when that was
            answered. predicted: what was expected of it then. stay: on the node, while it lasts.
        wall_s: arrival in seconds since the epoch. asked: targets and all that the client says about service.
        decision: the policy's latest. entry: the same in the decision log, if it is kept there.
        moved_from: node that it was to decode on until prefill had ended; None if it stayed there.
        estimated: as in :class:`~pdhub.api.request.RequestRecord`, unordered.
        headers: those that rules may match. rules: those that it started under; a reload does not touch them.
    """

    id: str
    arrived: float
    rules: Rulebook
    client_id: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)
    wall_s: float = 0.0
    asked: SloReading = field(default_factory=SloReading)
    headers: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[int, ...] = ()
    model: str = ""
    pool: str | None = None
    node: str | None = None
    moved_from: str | None = None
    prefill: str | None = None
    reason: str = ""
    attempts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    estimated: frozenset[str] = frozenset()
    first_at: float | None = None
    last_at: float | None = None
    queued_s: float = 0.0
    concurrency: int | None = None
    sent_at: float | None = None
    prefill_sent_at: float | None = None
    prefilled_at: float | None = None
    cached_tokens: int | None = None
    predicted: Prediction = field(default_factory=Prediction)
    stay: Stay | None = None
    decision: Decision | None = None
    entry: Entry | None = None
    stats: Mapping[str, float] = field(default_factory=dict)
    gaps: Gaps = field(default_factory=Gaps)

    @classmethod
    def begin(cls, headers: Mapping[str, str], now: float, rules: Rulebook) -> Flight:
        """From lower-cased request headers."""
        trace = {}
        if _TRACEPARENT.fullmatch(headers.get("traceparent", "")):
            trace["traceparent"] = headers["traceparent"]
            if state := headers.get("tracestate", ""):
                trace["tracestate"] = state[:512]
        return cls(new_id(), now, rules, safe_id(headers.get("x-request-id", "")), trace, wall_s=time.time())

    @property
    def slo(self) -> SLO:
        return self.asked.slo

    @property
    def deadline(self) -> float:
        """When its first token is due."""
        target = self.slo.ttft_ms
        budget = self.rules.admission.default_budget_s if target is None else target / 1000
        return self.arrived + budget

    @property
    def tier(self) -> str | None:
        """The service tier that the answer names; None if the client named none."""
        return served_tier(self.asked.tier, self.reason)

    @property
    def shown_id(self) -> str:
        """What the answer's ``x-request-id`` says."""
        return self.client_id or self.id

    def tokens(self, count: int, now: float) -> None:
        """``count`` tokens arrived."""
        if self.last_at is None:
            self.first_at = now
            self.gaps.add(0.0, count - 1)
        else:
            self.gaps.add(now - self.last_at, count)
        self.last_at = now
        self.completion_tokens += count
        if self.stay is not None:
            self.stay.tokens(count, now)

    def untold(self, prompt_tokens: int) -> None:
        """An answer begins that will be relayed: until it tells its usage, nothing is known for certain.

        Args:
            prompt_tokens: estimate; taken if prefill told none.
        """
        self.estimated = frozenset({COMPLETION}) if self.prompt_tokens else frozenset({PROMPT, COMPLETION})
        self.prompt_tokens = self.prompt_tokens or prompt_tokens

    def told(self, prompt: int | None = None, completion: int | None = None) -> None:
        """The engine's own count; None = it does not say."""
        if prompt is not None:
            self.prompt_tokens = prompt
            self.estimated -= {PROMPT}
        if completion is not None:
            self.completion_tokens = completion
            self.estimated -= {COMPLETION}

    def restart(self) -> None:
        """An attempt failed before the first byte: nothing of it counts."""
        self.first_at = self.last_at = None
        self.completion_tokens = 0
        if PROMPT in self.estimated:
            self.prompt_tokens = 0
        self.estimated = frozenset()
        self.moved_from = None
        self.prefill_sent_at = self.prefilled_at = None
        self.stats = {}
        self.gaps = Gaps()

    def record(self, outcome: str, error_code: str | None, now: float) -> RequestRecord:
        """How it ended."""
        ttft = tpot = None
        if self.first_at is not None and self.last_at is not None:
            ttft = (self.first_at - self.arrived) * 1000
            if self.completion_tokens > 1:
                tpot = (self.last_at - self.first_at) * 1000 / (self.completion_tokens - 1)
        kv_bytes, itl_s = self.stats.get("kv_bytes"), self.gaps.quantile(0.99)
        return RequestRecord(
            id=self.id,
            model=self.model,
            pool=self.pool,
            node=self.node,
            prefill=self.prefill,
            reason=self.reason or (self.decision.reason.value if self.decision is not None else ""),
            outcome=outcome,
            error_code=error_code,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            ttft_ms=ttft,
            tpot_ms=tpot,
            itl_p99_ms=None if itl_s is None else itl_s * 1000,
            total_ms=(now - self.arrived) * 1000,
            handoff_ms=self.stats.get("handoff_ms"),
            kv_bytes=None if kv_bytes is None else int(kv_bytes),
            attempts=max(1, self.attempts),
            slo=self.slo,
            tier=self.tier if outcome == "ok" else None,
            session=self.asked.session,
            prefix=self.prefix,
            priority=self.asked.priority,
            queued_ms=self.queued_s * 1000,
            concurrency=self.concurrency,
            predicted_ttft_ms=self.predicted.ttft_ms,
            predicted_tpot_ms=self.predicted.tpot_ms,
            estimated=tuple(sorted(self.estimated)),
            extra={
                "client_request_id": self.client_id,
                "slot_wait_ms": self.stats.get("wait_ms"),
                "sent_ms": self._since_arrival_ms(self.sent_at),
                "prefill_sent_ms": self._since_arrival_ms(self.prefill_sent_at),
                "prefilled_ms": self._since_arrival_ms(self.prefilled_at),
                "cached_tokens": self.cached_tokens,
                "moved_from": self.moved_from,
            },
        )

    def _since_arrival_ms(self, at: float | None) -> float | None:
        return None if at is None else (at - self.arrived) * 1000
