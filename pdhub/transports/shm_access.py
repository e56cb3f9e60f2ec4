"""What a writer may reach of a target: memory that is mapped here, and the grants that are open."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Hashable
from dataclasses import dataclass

from pdhub.transports.memory import address_of

log = logging.getLogger("pdhub.transports")


@dataclass(frozen=True, slots=True)
class Opened:
    """A region that may be written now."""

    segment: int
    address: int
    nbytes: int


class Access:
    """Mappings and open grants of one link. For its thread only.

    Mappings stay from one grant to the next, because mapping anew costs as much as copying; they go when the target
    says that it never uses that memory again.
    """

    def __init__(self) -> None:
        self._memory: dict[int, mmap.mmap] = {}
        self._opened: dict[bytes, Opened] = {}
        self._users: dict[bytes, set[Hashable]] = {}

    def get(self, token: bytes) -> Opened | None:
        """What the grant opens; None if it is not open."""
        return self._opened.get(token)

    def open(self, token: bytes, segment: int, mapped: int, nbytes: int, fd: int | None) -> bool:
        """The target opened a grant. False: the memory cannot be mapped here, give the grant back."""
        if fd is not None:
            self.forget(segment)
            try:
                self._memory[segment] = mmap.mmap(fd, mapped)
            except OSError as error:
                log.warning("shm: cannot map %d bytes of the target: %s", mapped, error)
        memory = self._memory.get(segment)
        if memory is None:
            return False
        self._opened[token] = Opened(segment, address_of(memory), nbytes)
        return True

    def use(self, token: bytes, user: Hashable) -> None:
        """``user`` writes with this grant: it stays open until every user left, or the target ends it."""
        self._users.setdefault(token, set()).add(user)

    def leave(self, user: Hashable) -> list[bytes]:
        """``user`` writes no more. The grants that nobody else uses are closed; they must be returned."""
        closed = []
        for token in list(self._users):
            self._users[token].discard(user)
            if not self._users[token]:
                del self._users[token]
                if self._opened.pop(token, None) is not None:
                    closed.append(token)
        return closed

    def close(self, token: bytes) -> None:
        """The grant is no longer open."""
        self._opened.pop(token, None)
        self._users.pop(token, None)

    def forget(self, segment: int) -> None:
        """Unmap memory, and close what was open in it."""
        memory = self._memory.pop(segment, None)
        if memory is not None:
            for token in [token for token, opened in self._opened.items() if opened.segment == segment]:
                self.close(token)
            memory.close()

    def clear(self) -> list[bytes]:
        """Unmap everything. The grants that were open."""
        tokens = list(self._opened)
        for segment in list(self._memory):
            self.forget(segment)
        return tokens
