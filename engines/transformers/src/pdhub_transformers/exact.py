"""Layers whose rows do not depend on how many rows there are.

A matrix product of one row and of eight rows uses different kernels and rounds differently, so a token could
depend on who else is being served. Here several rows are a *batch of one-row products* instead: each row goes
through the kernel that a lone row would, while all of them share one pass over the weights. Activations run row by
row, because the vector and the scalar form of an exponential differ and a row's border moves between them.

That the two products are equal bit for bit is a property of the BLAS library, not of the standard:
:func:`make_exact` checks it for every weight shape on the machine at hand, and where it does not hold rows run one
after another. The loader then checks the whole model once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

_log = logging.getLogger("pdhub.transformers")


class RowLinear(nn.Linear):  # type: ignore[misc]
    """``nn.Linear`` for ``[rows, 1, features]``; anything else takes the usual way."""

    batched: bool

    def forward(self, input: Tensor) -> Tensor:
        rows = input.shape[0]
        if rows == 1 or input.dim() != 3 or input.shape[1] != 1:
            return nn.functional.linear(input, self.weight, self.bias)
        if self.batched:
            return _batched(input, self.weight, self.bias)
        return torch.cat([nn.functional.linear(row, self.weight, self.bias) for row in input.split(1)])


def _batched(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    matrix = weight.t().unsqueeze(0).expand(input.shape[0], -1, -1)
    return torch.bmm(input, matrix) if bias is None else torch.baddbmm(bias, input, matrix)


def _holds(layer: nn.Linear, rows: int) -> bool:
    """Whether the batched product equals the single ones for random input of ``rows`` rows."""
    generator = torch.Generator().manual_seed(0)
    shape = (rows, 1, layer.in_features)
    value = torch.randn(shape, generator=generator).to(layer.weight.device, layer.weight.dtype)
    single = torch.cat([nn.functional.linear(row, layer.weight, layer.bias) for row in value.split(1)])
    return bool(torch.equal(_batched(value, layer.weight, layer.bias), single))


def make_exact(model: nn.Module, max_rows: int) -> bool:
    """Give every linear layer of ``model`` row-exact batches of up to ``max_rows`` rows, in place.

    Returns True if all weight shapes may run batched here, False if some run row by row.
    """
    known: dict[tuple[int, int, bool], bool] = {}
    for layer in model.modules():
        if _is_activation(layer):
            layer.forward = partial(_row_by_row, layer.forward)
        if type(layer) is not nn.Linear:
            continue
        shape = (layer.in_features, layer.out_features, layer.bias is not None)
        if shape not in known:
            with torch.inference_mode():
                known[shape] = all(_holds(layer, rows) for rows in _probes(max_rows))
            if not known[shape]:
                _log.info("weights %sx%s: rows run one after another, batches round differently here", *shape[:2])
        layer.__class__ = RowLinear
        layer.batched = known[shape]
    return all(known.values())


def _is_activation(layer: nn.Module) -> bool:
    """A leaf that holds nothing: SiLU, GELU … (and dropout, for which it makes no difference)."""
    parts = (layer.children(), layer.parameters(), layer.buffers())
    return all(next(iter(part), None) is None for part in parts)


def _row_by_row(forward: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    return forward(input) if input.shape[0] == 1 else torch.cat([forward(row) for row in input.split(1)])


def _probes(max_rows: int) -> list[int]:
    return sorted({rows for rows in (2, 3, max_rows) if 2 <= rows <= max_rows})
