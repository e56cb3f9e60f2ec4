"""Devices as NIXL names them."""

from __future__ import annotations

from typing import Any


def segment(nixl: Any, device: str) -> tuple[Any, int]:
    """NIXL's kind of memory, and its number of the device, for ``cpu`` or ``cuda:N``."""
    if device == "cpu":
        return nixl.DRAM_SEG, 0
    return nixl.VRAM_SEG, int(device.partition(":")[2] or 0)
