"""What the latency model is told: seeds, observations, and how long they count."""

from __future__ import annotations

from dataclasses import dataclass

from pdhub.api.request import RequestRecord


@dataclass(frozen=True, slots=True)
class PoolSeed:
    """What the configuration says of a pool before anything was observed; None = nothing.

    Args:
        ttft_ms: time to first token of a short prompt on an idle node, prefill included.
        tpot_ms: time per output token of one request alone.
        ttft_ms_per_token: added by each prompt token that is not cached.
        ttft_ms_per_waiting_token: added by each prompt token ahead at prefill; None = as ``ttft_ms_per_token``.
        tpot_ms_per_request: added by each other running request.
        tpot_ms_per_context_token: added by each token of context.
        output_tokens: typical length of an answer.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    ttft_ms_per_token: float | None = None
    ttft_ms_per_waiting_token: float | None = None
    tpot_ms_per_request: float | None = None
    tpot_ms_per_context_token: float | None = None
    output_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One observation. Members that are None teach nothing, so TTFT and TPOT may come apart: TTFT as soon as the
    first token is there, TPOT again and again while tokens come.

    Args:
        pool: of prefill instances :data:`PREFILL`; their TTFT is the time of their answer.
        at_s: when it was observed, monotonic seconds.
        ttft_ms: from sending it to the node until the first token, without the wait for a slot.
        backlog_tokens: prompt tokens ahead of it at prefill when it was sent.
        cached_tokens: of the prompt, found in a prefix cache; None = unknown. seen_tokens: of the prompt, whose
            beginning was sent before, as :meth:`LatencyModel.seen_tokens` said; None = unknown.
        tpot_ms: per output token. running: requests on the node in that time, this one included.
        context_tokens: mean context in that time; None = ``prompt_tokens``.
        output_tokens: length of the whole answer, if it ended by itself.
    """

    pool: str
    node: str
    at_s: float
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    seen_tokens: int | None = None
    backlog_tokens: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    running: float = 1.0
    context_tokens: float | None = None
    output_tokens: int | None = None

    @classmethod
    def of(cls, record: RequestRecord, at_s: float) -> Sample | None:
        """Everything that an ended request teaches; None if it did not run anywhere.

        ``record.extra`` may add ``sent_ms`` (arrival to sending it to the node; default: ``queued_ms``),
        ``slot_wait_ms``, ``backlog_tokens`` and ``cached_tokens``.
        """
        if record.pool is None or record.node is None:
            return None
        ttft = record.ttft_ms
        if ttft is not None:
            ttft -= (record.extra.get("sent_ms") or record.queued_ms) + (record.extra.get("slot_wait_ms") or 0.0)
        return cls(
            pool=record.pool,
            node=record.node,
            at_s=at_s,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.extra.get("cached_tokens"),
            backlog_tokens=record.extra.get("backlog_tokens") or 0,
            ttft_ms=ttft,
            tpot_ms=record.tpot_ms,
            running=float(record.concurrency or 1),
            context_tokens=record.prompt_tokens + record.completion_tokens / 2,
            output_tokens=record.completion_tokens if record.outcome == "ok" else None,
        )


@dataclass(frozen=True, slots=True)
class Tuning:
    """Args:
    stale_s: observations of a node older than this no longer speak for it.
    forget_s: nor for its long run, after this. Then the seed counts again.
    refresh_s: a frozen table is replaced no more often than this.
    """

    stale_s: float = 10.0
    forget_s: float = 120.0
    refresh_s: float = 0.05
