"""Where an answer goes: the face of the client's connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Sink(Protocol):
    """One answer. ``started`` turns true when the status line leaves; nothing can be retried after that.

    ``write`` waits while the client is slow.
    """

    started: bool

    async def start(self, status: int, headers: Mapping[str, str]) -> None: ...

    async def write(self, data: bytes) -> None: ...

    async def end(self) -> None: ...
