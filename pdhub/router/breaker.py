"""Circuit breaker of one endpoint. Sans-IO: the clock is an argument."""

from __future__ import annotations

from enum import StrEnum


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Opens after ``failures`` failures in a row; after ``open_s`` one request may try the endpoint.

    That trial has a deadline: a trial that never reports must not keep the endpoint out for ever. Outcomes
    are reported when a request *ends*, not at its headers. A client's own error is neutral: it says nothing
    about the endpoint's health, but it does end a trial.
    """

    def __init__(self, failures: int, open_s: float, trial_s: float) -> None:
        self.failures = failures
        self.open_s = open_s
        self.trial_s = trial_s
        self._count = 0
        self._opened_at: float | None = None
        self._trial_until: float | None = None
        self._fenced_until = 0.0

    def state(self, now: float) -> BreakerState:
        """``HALF_OPEN`` only while a trial may start; during a trial it is ``OPEN`` for everybody else."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        if now < self._closed_until():
            return BreakerState.OPEN
        if self._trial_until is not None and now < self._trial_until:
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN

    def next_change(self, now: float) -> float | None:
        """When the state changes by itself; None if it does not."""
        if self._opened_at is None:
            return None
        moments = [self._closed_until()]
        if self._trial_until is not None:
            moments.append(self._trial_until)
        later = [m for m in moments if m > now]
        return min(later) if later else None

    def acquire(self, now: float) -> bool:
        """May a request go there now? Taking the trial of a half-open breaker counts."""
        state = self.state(now)
        if state is BreakerState.HALF_OPEN:
            self._trial_until = now + self.trial_s
            return True
        return state is BreakerState.CLOSED

    def success(self) -> None:
        """A request ended well."""
        self._count = 0
        self._opened_at = None
        self._trial_until = None

    def failure(self, now: float) -> None:
        """A request failed, and the endpoint is to blame."""
        self._count += 1
        if self._opened_at is not None or self._count >= self.failures:
            self._opened_at = now
            self._trial_until = None

    def fence(self, now: float, seconds: float) -> None:
        """Nobody may go there for so long; then as after a failure."""
        self._opened_at, self._trial_until = now, None
        self._fenced_until = max(self._fenced_until, now + seconds)

    def _closed_until(self) -> float:
        assert self._opened_at is not None
        return max(self._opened_at + self.open_s, self._fenced_until)

    def neutral(self) -> None:
        """A request ended without a word about the endpoint: refused as wrong, busy, or cancelled."""
        self._trial_until = None


def acquire_all(breakers: list[Breaker], now: float) -> bool:
    """All or none: a trial that one breaker gave is given back if another refuses."""
    taken: list[Breaker] = []
    for breaker in breakers:
        if not breaker.acquire(now):
            for other in taken:
                other.neutral()
            return False
        taken.append(breaker)
    return True
