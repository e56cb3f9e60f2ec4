"""How soon more important requests need their first token, learned from those that came, so that requests which may be
shed leave it to them. Whoever has a place keeps it: nodes that are full, or an engine's own backlog of prompts, may be
good enough for patient work alone and too slow for everybody else."""

from __future__ import annotations

from collections import deque
from typing import Final

from pdhub.api.request import RequestRecord

WINDOW: Final = 256
"""Ended requests that count, of any importance: when the important ones stay away, their need is forgotten."""

QUANTILE: Final = 0.1
"""Of their targets, and never the smallest, however few there are: one request that asks for the impossible must not
turn others away."""

EVERY: Final = 8
"""Ended requests between two looks at all of them."""


class Reserve:
    """``ttft_ms``: what the more demanding of the important requests ask for; None = there were none of late.

    Args:
        seed_ms: what to take it for until requests have ended.
    """

    def __init__(self, seed_ms: float | None = None) -> None:
        self.ttft_ms = seed_ms
        self._targets: deque[float | None] = deque(maxlen=WINDOW)
        self._unseen = 0

    def observe(self, record: RequestRecord) -> None:
        """A request ended, however."""
        self._targets.append(record.slo.ttft_ms if record.priority >= 0 else None)
        self._unseen += 1
        if self._unseen >= EVERY:
            self._unseen = 0
            asked = sorted(target for target in self._targets if target is not None)
            self.ttft_ms = asked[max(1, int(len(asked) * QUANTILE))] if len(asked) > 1 else None
