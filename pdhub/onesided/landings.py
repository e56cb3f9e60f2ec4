"""The target's regions: who has them open, and when their memory may be used again.

The rule is that of the shm transport: memory whose every open grant was *returned* is used again; memory that a
writer may still reach is detached.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pdhub.onesided.memory import Held
from pdhub.onesided.wire import TOKEN_BYTES, Kind, Message

COOPERATE_S = 0.5
"""How long a fence waits for writers to stop by themselves: a forced end can break their connection, and with it
other requests' writes."""


class Writer(Protocol):
    """A control connection. ``knows``: numbers of memory that its library was told of."""

    knows: set[int]

    def send(self, message: Message) -> None:
        """Never blocks: a connection that takes nothing any more is ended."""


@dataclass(eq=False)
class Landing:
    """One region. ``opened``: grants that are open. ``lost``: a writer is gone without returning its grant,
    or said that it cannot tell."""

    memory: Held
    nbytes: int
    freed: Callable[[], None] | None = None
    tokens: set[bytes] = field(default_factory=set)
    opened: set[tuple[Writer, bytes]] = field(default_factory=set)
    fenced: bool = False
    lost: bool = False
    detached: bool = False


class Landings:
    """Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._regions: dict[str, Landing] = {}
        self._tokens: dict[bytes, Landing] = {}
        self._freed: set[Landing] = set()

    def add(self, region_id: str, memory: Held, nbytes: int) -> None:
        with self._changed:
            self._regions[region_id] = Landing(memory, nbytes)

    def grant(self, region_id: str) -> bytes:
        """A token that opens the region. Raises ValueError if there is none, or it was fenced."""
        with self._changed:
            landing = self._regions.get(region_id)
            if landing is None or landing.fenced:
                raise ValueError(f"region {region_id!r} cannot be granted")
            token = secrets.token_bytes(TOKEN_BYTES)
            landing.tokens.add(token)
            self._tokens[token] = landing
            return token

    def fence(self, region_id: str, within_s: float) -> bool:
        """Revoke every grant. True if no write can reach the region any more."""
        deadline = time.monotonic() + min(within_s / 2, COOPERATE_S)
        with self._changed:
            landing = self._regions.get(region_id)
            if landing is None:
                return True
            landing.fenced = True
            self._revoke_tokens(landing)
            for writer, token in list(landing.opened):
                writer.send(Message(Kind.REVOKED, token))
            while landing.opened and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            if landing.opened or landing.lost:
                return self._detach(landing)
            return True

    def free(self, region_id: str, release: Callable[[], None]) -> None:
        """The host needs the region no more. Idempotent.

        Args:
            release: gives this process's own view back; called when the memory goes.
        """
        with self._changed:
            landing = self._regions.pop(region_id, None)
            if landing is None:
                return
            self._revoke_tokens(landing)
            landing.freed = release
            self._freed.add(landing)
            for writer, token in list(landing.opened):
                writer.send(Message(Kind.RECALL, token))
            self._settle(landing)

    def open(self, writer: Writer, token: bytes) -> None:
        """A writer presents a grant."""
        with self._changed:
            landing = self._tokens.get(token)
            if landing is None:
                writer.send(Message(Kind.REFUSED, token))
                return
            landing.opened.add((writer, token))
            memory = landing.memory
            extra = memory.device.encode() + b"\0"
            if memory.number not in writer.knows:
                writer.knows.add(memory.number)
                extra += memory.description
            writer.send(Message(Kind.OPENED, token, memory.number, memory.address, landing.nbytes, extra))

    def returned(self, writer: Writer, token: bytes, lost: bool = False) -> None:
        """No write of this grant runs any more. ``lost``: but bytes of one that broke off may still arrive."""
        with self._changed:
            for landing in self._all():
                if (writer, token) in landing.opened:
                    landing.opened.discard((writer, token))
                    landing.lost = landing.lost or lost
                    self._settle(landing)
            self._changed.notify_all()

    def gone(self, writer: Writer) -> None:
        """Its connection ended: what it has open may be written to, by its process or by what is under way."""
        with self._changed:
            for landing in self._all():
                mine = {access for access in landing.opened if access[0] is writer}
                if mine:
                    landing.opened -= mine
                    landing.lost = True
                    self._settle(landing)
            self._changed.notify_all()

    def close(self) -> None:
        """Forget every region; memory that a writer may still reach is detached."""
        with self._changed:
            for landing in self._all():
                landing.lost = landing.lost or bool(landing.opened)
                landing.opened.clear()
                if landing.freed is None:
                    landing.freed = _nothing
                self._freed.add(landing)
                self._settle(landing)
            self._regions.clear()
            self._tokens.clear()

    # -- under the lock -------------------------------------------------------------------------------------------

    def _all(self) -> list[Landing]:
        return [*self._regions.values(), *self._freed]

    def _revoke_tokens(self, landing: Landing) -> None:
        for token in landing.tokens:
            self._tokens.pop(token, None)
        landing.tokens.clear()

    def _detach(self, landing: Landing) -> bool:
        landing.detached = landing.detached or landing.memory.detach()
        return landing.detached

    def _settle(self, landing: Landing) -> None:
        """Memory of a freed region goes when no grant is open."""
        if landing not in self._freed or landing.opened or landing.freed is None:
            return
        if landing.lost and not self._detach(landing):
            return  # withheld for the life of this process
        self._freed.discard(landing)
        landing.freed()
        if not landing.detached:
            landing.memory.reuse()
        elif not landing.lost:
            landing.memory.reclaim()


def _nothing() -> None:
    return None
