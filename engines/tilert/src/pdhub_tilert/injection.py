"""From the bytes of a landing to what TileRT's ``inject`` takes."""

from __future__ import annotations

import torch
from torch import Tensor

from pdhub_tilert.landing import Planes
from pdhub_tilert.loading import TileRT

Layer = tuple[Tensor, Tensor, Tensor]
"""Index keys ``[tokens, 128]``, latents ``[tokens, 512]``, rotary parts ``[tokens, 64]``; bfloat16."""


def convert(planes: Planes, count: int, tokens: int, tilert: TileRT) -> list[Layer]:
    """Layers that share nothing with the landing: when this returns, no GPU reads it any more.

    Args:
        count: layers. tokens: of the prompt.
    """
    out: list[Layer] = []
    devices = set()
    with torch.inference_mode():
        for layer in range(count):
            kv, pe, ki = (_near(plane, tilert.device) for plane in planes.of(layer, tokens))
            rotary = pe.view(torch.bfloat16).view(tokens, -1).clone()
            out.append((tilert.keys(ki, tokens), tilert.latents(kv, tokens), rotary))
            devices.add(kv.device)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return out


def _near(plane: Tensor, device: str | None) -> Tensor:
    """On a GPU if the engine needs it there; the one it lies on, if it lies on one."""
    return plane if device is None or plane.is_cuda else plane.to(device, non_blocking=True)
