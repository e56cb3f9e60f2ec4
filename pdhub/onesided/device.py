"""Device memory of a target. Its addresses cannot be put over other pages, so lost writers keep it."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager
from typing import Any

from pdhub.api import Region
from pdhub.onesided.memory import _numbers
from pdhub.onesided.native import Native
from pdhub.onesided.tensors import import_torch, region_bytes
from pdhub.transports.memory import rounded

log = logging.getLogger("pdhub.onesided")


class DeviceMemory:
    """A tensor of its own, registered as long as it lives."""

    def __init__(self, stock: DeviceStock, tensor: Any, device: str, handle: object, description: bytes) -> None:
        self._stock = stock
        self.tensor = tensor
        self.device = device
        self.handle = handle
        self.description = description
        self.number = next(_numbers)
        self.address: int = tensor.data_ptr()
        self.nbytes: int = tensor.numel()

    def reuse(self) -> None:
        self._stock.give(self)

    def detach(self) -> bool:
        return self._stock.set_aside(self)

    def reclaim(self) -> None:
        self._stock.take_back(self)


class DeviceStock:
    """Allocates with torch, registers, and keeps what is freed for the next regions.

    The memory is in a pool of its own: a block that torch gave out before may still be used by kernels that were
    launched and have not run yet, which a writer that knows no streams would not wait for.

    Args:
        limit: bytes that lost writers may keep: what they may still reach is set aside for good.
        warm: bytes kept for the next regions.
    """

    def __init__(self, native: Native, limit: int, warm: int) -> None:
        self._native = native
        self._limit = limit
        self._most_warm = warm
        self._lock = threading.Lock()
        self._aside: list[DeviceMemory] = []
        self._warm: list[DeviceMemory] = []
        self._pools: dict[str, Any] = {}

    def take(self, nbytes: int, device: str) -> DeviceMemory:
        """Raises MemoryError if there is none, ValueError if there is no such device."""
        size = rounded(nbytes)
        torch = import_torch()
        device = _full_name(torch, device)
        with self._lock:
            fits = [memory for memory in self._warm if memory.device == device and memory.nbytes == size]
            if fits:
                self._warm.remove(fits[-1])
                return fits[-1]
        return self._make(torch, size, device)

    def give(self, memory: DeviceMemory) -> None:
        """No writer can reach it. The oldest go if too much is kept."""
        with self._lock:
            self._warm.append(memory)
            over = []
            while sum(item.nbytes for item in self._warm) > self._most_warm:
                over.append(self._warm.pop(0))
        for item in over:
            self._native.deregister(item.handle)

    def take_back(self, memory: DeviceMemory) -> None:
        """Nobody can reach it any more: torch may use it again."""
        with self._lock:
            self._aside.remove(memory)

    def set_aside(self, memory: DeviceMemory) -> bool:
        """Never use it again, though nobody answers for it. False if too much is aside already."""
        with self._lock:
            if sum(item.nbytes for item in self._aside) + memory.nbytes > self._limit:
                log.error("%s: %d bytes cannot be set aside for a lost writer", memory.device, memory.nbytes)
                return False
            self._aside.append(memory)
        log.warning("%s: %d bytes are set aside for a lost writer", memory.device, memory.nbytes)
        self._native.deregister(memory.handle)
        return True

    def close(self) -> None:
        """Registrations end with the library."""
        with self._lock:
            self._aside.clear()
            self._warm.clear()
            self._pools.clear()

    def _make(self, torch: Any, size: int, device: str) -> DeviceMemory:
        try:
            with self._pool(torch, device):
                tensor = torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"no {size} bytes on {device}") from error
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"{device} cannot be used: {error}") from error
        try:
            handle = self._native.register(tensor.data_ptr(), size, device)
        except ValueError as error:
            raise MemoryError(str(error)) from error
        return DeviceMemory(self, tensor, device, handle, self._native.describe_memory(handle))

    def _pool(self, torch: Any, device: str) -> AbstractContextManager[None]:
        with self._lock:
            pool = self._pools.get(device)
            if pool is None:
                with torch.cuda.device(device):  # a pool is the device's that is current when it is made
                    pool = self._pools[device] = torch.cuda.MemPool()
        context: AbstractContextManager[None] = torch.cuda.use_mem_pool(pool, device)
        return context


def host_copy(region: Region) -> memoryview:
    """A region's bytes in host memory."""
    return memoryview(region_bytes(region).cpu().numpy())


def _full_name(torch: Any, device: str) -> str:
    """``cuda`` as ``cuda:N``. Raises ValueError if there is no such device."""
    try:
        number = torch.device(device).index
        name = f"cuda:{torch.cuda.current_device() if number is None else number}"
        torch.cuda.get_device_properties(name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{device} cannot be used: {error}") from error
    return name
