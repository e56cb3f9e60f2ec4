"""What happened on a node, in order: a bounded list that tests and the status page read."""

from __future__ import annotations

import time
from collections import deque
from typing import Final, NamedTuple

LIMIT: Final = 4096


class Event(NamedTuple):
    """``at`` is monotonic seconds; ``name`` is one of claimed, joined, done, ready, slot, first_token, finished,
    cancelled, failed, fenced, released."""

    at: float
    name: str
    transfer_id: str


class Trace:
    """The newest :data:`LIMIT` events."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque(maxlen=LIMIT)

    def add(self, name: str, transfer_id: str) -> None:
        self.events.append(Event(time.monotonic(), name, transfer_id))
