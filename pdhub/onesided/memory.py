"""A target's memory: registered with the library, reachable by writers, and in the end beyond their reach."""

from __future__ import annotations

import ctypes
import mmap
from itertools import count
from typing import Protocol

from pdhub.onesided.native import Native
from pdhub.transports.memory import Memory, WarmMemory, private_memory

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_numbers = count(1)
_detached: list[Memory] = []
"""Address ranges that a lost writer may still write to. Kept for the life of the process, so that they are never
mapped again; they hold no pages but those that late writes touch."""


class Held(Protocol):
    """Memory of one region. ``number`` is unique in this process; ``description`` is for writers' libraries."""

    number: int
    address: int
    device: str
    description: bytes

    def reuse(self) -> None:
        """No writer can reach it: keep it for another region, or free it."""

    def detach(self) -> bool:
        """A writer may still reach it: make that harmless. False if that is not possible."""

    def reclaim(self) -> None:
        """It was detached, and every writer has answered after all."""


class HostMemory:
    """Host memory from a warm stock, registered as long as it is in it."""

    device = "cpu"

    def __init__(self, stock: HostStock, memory: Memory) -> None:
        self._stock = stock
        self.memory = memory
        self.number, self._handle, self.description = stock.known[memory.serial]
        self.address = memory.address

    @property
    def handle(self) -> object:
        return self._handle

    def reuse(self) -> None:
        self._stock.give(self.memory)

    def detach(self) -> bool:
        self._stock.forget(self.memory)
        detach(self.memory)
        return True

    def reclaim(self) -> None:
        """Only addresses are left of it: they are kept."""


class HostStock:
    """Registered host memory, kept warm. Registering and faulting pages in costs more than copying into them."""

    def __init__(self, native: Native, limit: int) -> None:
        self._native = native
        self.known: dict[int, tuple[int, object, bytes]] = {}
        self._warm = WarmMemory(self._make, limit, self.forget)
        self._closed = False

    def take(self, nbytes: int) -> HostMemory:
        """Raises MemoryError."""
        return HostMemory(self, self._warm.take(nbytes))

    def give(self, memory: Memory) -> None:
        self._warm.give(memory)

    def forget(self, memory: Memory) -> None:
        """Take it from the library. The library may refuse writes into it from now on."""
        known = self.known.pop(memory.serial, None)
        if known is not None:
            self._native.deregister(known[1])

    def close(self) -> None:
        """Drop what waits. Registrations end with the library."""
        self._warm.close()
        self.known.clear()

    def _make(self, nbytes: int) -> Memory:
        memory = private_memory(nbytes)
        try:
            handle = self._native.register(memory.address, memory.nbytes, "cpu")
        except ValueError as error:
            memory.drop()
            raise MemoryError(str(error)) from error
        self.known[memory.serial] = (next(_numbers), handle, self._native.describe_memory(handle))
        return memory


def detach(memory: Memory) -> None:
    """Put other pages under its addresses. Whoever still writes there, by whatever mechanism (another process's
    ``process_vm_writev``, this process's own receiving thread), then changes nothing that anybody reads, and no
    thread faults."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
    where = _libc.mmap(memory.address, memory.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if where != memory.address:
        raise MemoryError(f"cannot detach memory: errno {ctypes.get_errno()}")
    _detached.append(memory)
