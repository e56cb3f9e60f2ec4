"""What a rule asks of a request. Everything that is given must hold; an empty match holds for every request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, time, timedelta, tzinfo
from fnmatch import fnmatchcase

from pdhub.api.request import Feature, RequestView


@dataclass(frozen=True, slots=True)
class Range:
    """``at_least`` ≤ value < ``below``; None = no bound."""

    at_least: float | None = None
    below: float | None = None

    def holds(self, value: float | None) -> bool:
        """An unknown value is in no range."""
        if value is None:
            return False
        return (self.at_least is None or value >= self.at_least) and (self.below is None or value < self.below)


@dataclass(frozen=True, slots=True)
class Window:
    """A time of the day on some days.

    Args:
        days: 0 = Monday; the day on which the window starts.
        start, end: ``end`` is outside. An end at or before the start lies on the next day.
    """

    days: frozenset[int]
    start: time
    end: time
    zone: tzinfo = UTC

    def holds(self, wall_s: float) -> bool:
        """Is the moment, in seconds since the epoch, inside?"""
        moment = datetime.fromtimestamp(wall_s, self.zone)
        clock = moment.time()
        today = moment.weekday() in self.days
        if self.start < self.end:
            return today and self.start <= clock < self.end
        yesterday = (moment - timedelta(days=1)).weekday() in self.days
        return (today and clock >= self.start) or (yesterday and clock < self.end)


@dataclass(frozen=True, slots=True)
class Match:
    """Texts are patterns with ``*``, ``?`` and ``[…]``; of a list one must fit.

    Args:
        headers: lower-cased name → pattern; a header that was not sent fits none.
        has_slo: whether any target must, or must not, be there.
        features: all of them are needed by the request. without: none of them is.
        windows: one of them must hold; a request whose wall time is unknown is in none.
    """

    models: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    slo_classes: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: bool | None = None
    has_slo: bool | None = None
    ttft_ms: Range | None = None
    tpot_ms: Range | None = None
    prompt_tokens: Range | None = None
    max_tokens: Range | None = None
    priority: Range | None = None
    features: frozenset[Feature] = frozenset()
    without: frozenset[Feature] = frozenset()
    windows: tuple[Window, ...] = ()

    def holds(self, request: RequestView) -> bool:
        """Pure."""
        slo = request.slo
        return (
            _one(self.models, request.model)
            and _one(self.endpoints, request.endpoint)
            and _one(self.tenants, request.tenant)
            and _one(self.slo_classes, slo.slo_class or "")
            and (self.stream is None or request.stream is self.stream)
            and (self.has_slo is None or (slo.ttft_ms is not None or slo.tpot_ms is not None) is self.has_slo)
            and _in(self.ttft_ms, slo.ttft_ms)
            and _in(self.tpot_ms, slo.tpot_ms)
            and _in(self.prompt_tokens, request.prompt_tokens)
            and _in(self.max_tokens, request.max_tokens)
            and _in(self.priority, request.priority)
            and self.features <= request.features
            and not self.without & request.features
            and all(_header(request.headers, name, pattern) for name, pattern in self.headers.items())
            and (not self.windows or _now(self.windows, request.wall_s))
        )


def _one(patterns: tuple[str, ...], text: str) -> bool:
    return not patterns or any(fnmatchcase(text, pattern) for pattern in patterns)


def _in(bounds: Range | None, value: float | None) -> bool:
    return bounds is None or bounds.holds(value)


def _header(headers: Mapping[str, str], name: str, pattern: str) -> bool:
    return name in headers and fnmatchcase(headers[name], pattern)


def _now(windows: tuple[Window, ...], wall_s: float | None) -> bool:
    return wall_s is not None and any(window.holds(wall_s) for window in windows)
