"""Copies a piece of a prompt's KV out of vLLM's cache into a staging slot, in canonical order."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from pdhub.api.errors import EngineFailed
from pdhub.api.layout import GroupKind, KVGroup, Order
from pdhub.api.transport import Region
from pdhub.connector.gather import (
    Physical,
    attention,
    clear_page_tail,
    indexer,
    kernel_ids,
    latent,
)
from pdhub.connector.handover import Handover
from pdhub.connector.layouts import FP8_DS_MLA, Layer, Plan
from pdhub.core.handoff import chunk_blocks, chunk_bytes

if TYPE_CHECKING:
    from pdhub.connector.fused import FusedGather

log = logging.getLogger("pdhub.connector")

DTYPES: Final = {FP8_DS_MLA: torch.uint8}


@dataclass(frozen=True, slots=True)
class Cache:
    """One layer's tensor.

    Args:
        ratio: the tensor's blocks in one of the scheduler's.
        physical: of full and sliding layers.
        ue8m0: of indexer layers, see :func:`pdhub.connector.gather.indexer`.
    """

    tensor: Tensor
    ratio: int = 1
    physical: Physical = Physical.PACKED
    ue8m0: bool = False


class TorchSource:
    """See :class:`pdhub.connector.pump.Source`.

    Args:
        caches: by layer name.
        device: where they are. On a CUDA device copies run on a stream of their own, behind an event of the forward
            pass that computed the KV; the device is never synchronised as a whole.
    """

    def __init__(self, plan: Plan, caches: Mapping[str, Cache], device: torch.device) -> None:
        self._plan, self._caches, self._device = plan, caches, device
        self.align = plan.align
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._fused = [
            self._one_kernel(group, layers) for group, layers in zip(plan.layout.groups, plan.layers, strict=True)
        ]

    def mark(self) -> Any:
        """An event behind everything that vLLM has launched; None on the CPU, where it has been computed already."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def nbytes(self, start: int, stop: int, tokens: int) -> int:
        """Bytes of a piece."""
        return chunk_bytes(self._plan.layout, start, stop, tokens)

    def copy(self, handover: Handover, start: int, stop: int, region: Region) -> None:
        """Fill the front of ``region``. Raises EngineFailed if the block table is too short."""
        nbytes = self.nbytes(start, stop, handover.tokens)
        with torch.inference_mode():
            if self._stream is None:
                self._fill(_bytes(region, nbytes), handover, start, stop)
                return
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                if handover.mark is not None:
                    self._stream.wait_event(handover.mark)
                target = _bytes(region, nbytes)
                if target.is_cuda:
                    self._fill(target, handover, start, stop)
                else:  # one large copy to the host, not one for each layer's stripes
                    scratch = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                    self._fill(scratch, handover, start, stop)
                    target.copy_(scratch, non_blocking=True)
                done = torch.cuda.Event(blocking=True)
                done.record(self._stream)
            done.synchronize()

    def _fill(self, target: Tensor, handover: Handover, start: int, stop: int) -> None:
        at = 0
        for group, layers, fused in zip(self._plan.layout.groups, self._plan.layers, self._fused, strict=True):
            count = len(chunk_blocks(group, start, stop, handover.tokens))
            places = len(group.layers)
            size = count * places * group.block_bytes
            if self._plan.layout.order is Order.BLOCK_MAJOR:
                blocks = target[at : at + size].view(count, places, group.block_bytes)
            else:
                blocks = target[at : at + size].view(places, count, group.block_bytes).transpose(0, 1)
            at += size
            if fused is not None:
                ids, skip = self._ids(layers[0], self._caches[layers[0].name], handover, start, stop)
                fused(blocks.view(-1), ids, skip, stop - start)
                continue
            cached: tuple[Any, Tensor, int] | None = None
            for index, layer in enumerate(layers):
                cache = self._caches[layer.name]
                key = (layer.group, layer.block_tokens, cache.ratio)
                if cached is None or cached[0] != key:
                    cached = (key, *self._ids(layer, cache, handover, start, stop))
                _, ids, skip = cached
                self._layer(blocks[:, index], group, layer, ids, skip, handover, start, stop)
            blocks[:, len(layers) :] = 0

    def _one_kernel(self, group: KVGroup, layers: Sequence[Layer]) -> FusedGather | None:
        """For caches on a GPU that are alike, as those of most models are."""
        if self._device.type != "cuda" or group.kind is not GroupKind.FULL:
            return None
        caches = [self._caches[layer.name] for layer in layers]
        kinds = {
            (c.ratio, c.physical, layer.group, layer.block_tokens) for c, layer in zip(caches, layers, strict=True)
        }
        if len(kinds) > 1 or caches[0].physical is not Physical.PACKED:
            return None
        try:
            from pdhub.connector.fused import FusedGather

            tensors = [cache.tensor for cache in caches]
            return FusedGather(tensors, heads=cache_heads(group), block_tokens=group.block_tokens)
        except Exception as error:  # noqa: BLE001 - compilers raise what they like, and there is the slower way
            log.warning("KV of %s is copied layer by layer, which slows prefill down: %s", group.name, error)
            return None

    def _ids(self, layer: Layer, cache: Cache, handover: Handover, start: int, stop: int) -> tuple[Tensor, int]:
        """Blocks of a piece in the tensor's units, and how many of their tokens come before it."""
        first, last = start // layer.block_tokens, -(-stop // layer.block_tokens)
        table = handover.table[layer.group]
        if len(table) < last:
            raise EngineFailed(f"vLLM named {len(table)} blocks for a prompt of which {last} are computed")
        ids = torch.tensor(table[first:last], dtype=torch.int64).to(self._device)
        return kernel_ids(ids, cache.ratio), start - first * layer.block_tokens

    def _layer(
        self,
        out: Tensor,
        group: KVGroup,
        layer: Layer,
        ids: Tensor,
        skip: int,
        handover: Handover,
        start: int,
        stop: int,
    ) -> None:
        """One layer's blocks: ``out`` is ``[block, bytes]``, strided."""
        tokens, cache = stop - start, self._caches[layer.name]
        if group.kind is GroupKind.INDEXER:
            pages = indexer(cache.tensor, ids, ue8m0=cache.ue8m0)[skip // group.block_tokens :][: out.shape[0]]
            clear_page_tail(pages, tokens)
            out.copy_(pages)
            return
        if group.kind is GroupKind.MLA:
            rows = latent(cache.tensor, ids)[skip : skip + tokens]
            if layer.part is not None:
                rows = rows[:, layer.part[0] // rows.itemsize : layer.part[1] // rows.itemsize]
            typed = out.view(cache.tensor.dtype).unflatten(1, (group.block_tokens, -1))
            _write(typed.unsqueeze(1), rows.unsqueeze(0), 0)
            return
        gone = max(0, min(handover.floor - start, tokens)) if group.kind is GroupKind.SLIDING else 0
        heads = cache_heads(group)
        typed = out.view(cache.tensor.dtype).unflatten(1, (2, heads, group.block_tokens, -1))
        for plane, rows in enumerate(attention(cache.tensor, ids, cache.physical)):
            _write(typed[:, plane], rows[:heads, skip : skip + tokens], gone)


def cache_heads(group: KVGroup) -> int:
    """Heads of a full or sliding group's blocks."""
    return int(group.axes[1].partition(":")[2])


def _write(out: Tensor, rows: Tensor, gone: int) -> None:
    """Tokens into blocks: ``out`` is ``[block, head, token, dim]``, ``rows`` ``[head, tokens, dim]``.

    Args:
        gone: so many tokens at the front are not there any more, and become zero.
    """
    per_block, tokens = out.shape[2], rows.shape[1]
    whole = tokens // per_block
    if whole:
        body = rows[:, : whole * per_block].unflatten(1, (whole, per_block)).transpose(0, 1)
        out[:whole].copy_(body)
    rest = tokens - whole * per_block
    if rest:
        out[whole, :, :rest].copy_(rows[:, whole * per_block :])
        out[whole, :, rest:] = 0
    if gone:
        full, part = divmod(gone, per_block)
        out[:full] = 0
        if part:
            out[full, :, :part] = 0


def _bytes(region: Region, nbytes: int) -> Tensor:
    if region.view is not None:
        return torch.frombuffer(region.view, dtype=torch.uint8, count=nbytes)
    owner = region.owner
    assert isinstance(owner, Tensor), "staging on a device is a tensor"
    return owner[:nbytes]
