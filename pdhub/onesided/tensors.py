"""A landing's memory as torch can look at it. torch is imported when it is needed."""

from __future__ import annotations

from typing import Any

from pdhub.api import PluginError, Region, TransferFailed


def region_bytes(region: Region) -> Any:
    """A region's bytes as a ``torch.Tensor``, uint8; a view that keeps the region alive.

    Raises:
        TransferFailed: they can be read neither here nor on a CUDA device. PluginError: torch is not installed.
    """
    torch = import_torch()
    if region.view is not None:
        return torch.frombuffer(region.view, dtype=torch.uint8, count=region.nbytes)
    if not region.device.startswith("cuda"):
        raise TransferFailed(f"a landing in {region.device} memory cannot be read")
    return torch.as_tensor(_Foreign(region), device=region.device)


class _Foreign:
    """Memory that torch did not hand out itself; it keeps the region alive."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self.__cuda_array_interface__ = {
            "shape": (region.nbytes,),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }


def import_torch() -> Any:
    """Raises PluginError if it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise PluginError("device memory needs torch", hint="pip install torch, or use device cpu") from error
    return torch
