"""What a writer may reach of a target: memory that is mapped here, and the grants that are open."""

from __future__ import annotations

import logging
import mmap
from dataclasses import dataclass

from pdhub.transports.grants import OpenGrants
from pdhub.transports.memory import address_of

log = logging.getLogger("pdhub.transports")


@dataclass(frozen=True, slots=True)
class Opened:
    """A region that may be written now."""

    segment: int
    address: int
    nbytes: int


class Access(OpenGrants[Opened]):
    """Mappings and open grants of one link. For its thread only.

    Mappings stay from one grant to the next, because mapping anew costs as much as copying; they go when the target
    says that it never uses that memory again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._memory: dict[int, mmap.mmap] = {}

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
        self.opened(token, Opened(segment, address_of(memory), nbytes))
        return True

    def forget(self, segment: int) -> None:
        """Unmap memory, and close what was open in it."""
        memory = self._memory.pop(segment, None)
        if memory is not None:
            for token in [token for token, opened in self._opened.items() if opened.segment == segment]:
                self.close(token)
            memory.close()

    def clear(self) -> list[bytes]:
        """Unmap everything. The grants that were open."""
        tokens = super().clear()
        for segment in list(self._memory):
            self.forget(segment)
        return tokens
