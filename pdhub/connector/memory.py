"""Staging memory next to the cache: on its device if the transport reads that, else pinned host memory."""

from __future__ import annotations

from collections.abc import Set

import torch

from pdhub.api.transport import Region
from pdhub.sender.staging import Memory, host_memory


def staging_memory(device: torch.device, readable: Set[str]) -> Memory:
    """How to make staging slots.

    Args:
        device: where the cache is.
        readable: kinds of memory that the transport takes, as :attr:`TransportCaps.devices`.
    """
    if device.type != "cuda":
        return host_memory
    return _on_device(device) if "cuda" in readable else _pinned


def _on_device(device: torch.device) -> Memory:
    def make(region_id: str, nbytes: int) -> Region:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return Region(region_id, tensor.data_ptr(), nbytes, f"cuda:{tensor.device.index}", None, tensor)

    return make


def _pinned(region_id: str, nbytes: int) -> Region:
    tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return Region(region_id, tensor.data_ptr(), nbytes, "cpu", memoryview(tensor.numpy()), tensor)
