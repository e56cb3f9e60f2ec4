"""Landings next to the model: on its device if the transport has memory there, else in host memory."""

from __future__ import annotations

import torch

from pdhub.api import Transport


def landing_device(transport: Transport, device: torch.device) -> str:
    """Where landings are allocated, as :meth:`Transport.allocate` takes it."""
    if device.type == "cpu":
        return "cpu"
    name = f"{device.type}:{device.index or 0}"
    return name if transport.reaches(name) else "cpu"
