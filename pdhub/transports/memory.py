"""Page-backed memory for regions, kept warm between uses.

Faulting fresh pages in costs more than copying into them, so memory that is provably unreachable for every earlier
user is used again. Who may prove that differs a transport; here is only the stock.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from itertools import count

_SMALLEST = 64 << 10
_serials = count(1)


def rounded(nbytes: int) -> int:
    """``nbytes`` rounded up by at most an eighth, so that landings of similar size can share memory."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = max(1 << (nbytes - 1).bit_length() - 4, mmap.PAGESIZE)
    return -(-nbytes // step) * step


def address_of(buffer: mmap.mmap) -> int:
    """Where the mapping starts in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class Memory:
    """One mapping. ``fd`` is its memfd, or -1 for private memory. ``serial`` is unique in this process."""

    def __init__(self, nbytes: int, fd: int = -1) -> None:
        self.serial = next(_serials)
        self.nbytes = nbytes
        self.fd = fd
        try:
            self.map = mmap.mmap(fd, nbytes)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise MemoryError(f"cannot map {nbytes} bytes: {error.strerror or error}") from error
        self.address = address_of(self.map)

    def unreferenced(self) -> bool:
        """Nobody in this process holds a view of it. Python refuses to resize a mapping that has exports."""
        try:
            self.map.resize(self.nbytes)
        except BufferError:
            return False
        return True

    def drop(self) -> None:
        """Forget it. Pages go when the last view and the last process that maps them do."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with contextlib.suppress(BufferError):  # a view is still held: the mapping then goes with that view
            self.map.close()


def private_memory(nbytes: int) -> Memory:
    """Memory of this process only. Raises MemoryError."""
    return Memory(nbytes)


def shareable_memory(nbytes: int) -> Memory:
    """Memory without a name: other processes get its descriptor. It can neither shrink nor grow, so that no holder
    can make the others fault. Raises MemoryError."""
    try:
        fd = os.memfd_create("pdhub-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        raise MemoryError(f"cannot create {nbytes} bytes of shared memory: {error.strerror or error}") from error
    return Memory(nbytes, fd)


class WarmMemory:
    """A bounded stock of memory. Thread-safe.

    Args:
        make: makes fresh memory.
        limit: bytes that may wait here; more are dropped.
        dropped: told of memory that leaves the stock unused.
    """

    def __init__(
        self, make: Callable[[int], Memory], limit: int, dropped: Callable[[Memory], None] = lambda _: None
    ) -> None:
        self._make = make
        self._limit = limit
        self._dropped = dropped
        self._free: list[Memory] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Memory:
        """At least ``nbytes``, warm if possible. Raises MemoryError."""
        wanted = rounded(nbytes)
        with self._lock:
            fitting = [memory for memory in self._free if wanted <= memory.nbytes <= 2 * wanted]
            if fitting:
                best = min(fitting, key=lambda memory: memory.nbytes)
                self._free.remove(best)
                return best
        return self._make(wanted)

    def give(self, memory: Memory) -> None:
        """Nobody can write to it any more, in any process. It is used again if nobody here still looks at it."""
        drop = [memory]
        if memory.nbytes <= self._limit and memory.unreferenced():
            with self._lock:
                self._free.append(memory)
                drop = []
                while sum(item.nbytes for item in self._free) > self._limit:
                    drop.append(self._free.pop(0))
        for item in drop:
            self._dropped(item)
            item.drop()

    def close(self) -> None:
        """Drop the stock, and whatever is still given. Idempotent."""
        with self._lock:
            free, self._free, self._limit = self._free, [], 0
        for memory in free:
            memory.drop()
