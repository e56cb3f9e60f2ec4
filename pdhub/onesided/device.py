"""Device memory of a target. Its addresses cannot be put over other pages, so lost writers keep it."""

from __future__ import annotations

import logging
import threading
from typing import Any

from pdhub.api import PluginError
from pdhub.onesided.memory import _numbers
from pdhub.onesided.native import Native

log = logging.getLogger("pdhub.onesided")


class DeviceMemory:
    """A tensor of its own for one region."""

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
        self._stock.drop(self)

    def detach(self) -> bool:
        return self._stock.set_aside(self)

    def reclaim(self) -> None:
        self._stock.take_back(self)


class DeviceStock:
    """Allocates with torch and registers. What a lost writer may still reach is set aside for good, up to ``limit``
    bytes."""

    def __init__(self, native: Native, limit: int) -> None:
        self._native = native
        self._limit = limit
        self._lock = threading.Lock()
        self._aside: list[DeviceMemory] = []

    def take(self, nbytes: int, device: str) -> DeviceMemory:
        """Raises MemoryError if there is none, ValueError if there is no such device."""
        torch = _torch()
        try:
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"no {nbytes} bytes on {device}") from error
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"{device} cannot be used: {error}") from error
        device = str(tensor.device)
        try:
            handle = self._native.register(tensor.data_ptr(), nbytes, device)
        except ValueError as error:
            raise MemoryError(str(error)) from error
        return DeviceMemory(self, tensor, device, handle, self._native.describe_memory(handle))

    def drop(self, memory: DeviceMemory) -> None:
        self._native.deregister(memory.handle)

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
        with self._lock:
            self._aside.clear()


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise PluginError("device memory needs torch", hint="pip install torch, or use device cpu") from error
    return torch
