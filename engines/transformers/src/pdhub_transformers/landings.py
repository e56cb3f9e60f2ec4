"""Landings next to the model: on its device if the transport has memory there, else in host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from pdhub.api import Region, TransferFailed, Transport


def landing_device(transport: Transport, device: torch.device) -> str:
    """Where landings are allocated, as :meth:`Transport.allocate` takes it."""
    if device.type == "cpu":
        return "cpu"
    name = f"{device.type}:{device.index or 0}"
    try:
        probe = transport.allocate(1, name)
    except ValueError:
        return "cpu"
    transport.unregister(probe.id)
    return name


def region_bytes(region: Region) -> Tensor:
    """A region's bytes, uint8; a view. Raises TransferFailed if they can be read neither here nor on a CUDA device."""
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
