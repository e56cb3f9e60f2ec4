"""Cuts the operations of a write into what is posted to the library at once: few, large pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdhub.api import WriteOp
from pdhub.onesided.native import Piece

MAX_PIECES = 1024
"""Most pieces posted together: what a library takes in one request without trouble."""


def merged(ops: Sequence[WriteOp]) -> Iterator[tuple[int, str, int, int]]:
    """(source address, its device, offset in the region, bytes) of each run of operations that is contiguous on both
    sides: a descriptor costs microseconds whatever its size."""
    source = offset = nbytes = 0
    device = ""
    for op in ops:
        if not op.nbytes:
            continue
        start = op.local.address + op.local_offset
        if nbytes and start == source + nbytes and op.remote_offset == offset + nbytes and op.local.device == device:
            nbytes += op.nbytes
            continue
        if nbytes:
            yield source, device, offset, nbytes
        source, device, offset, nbytes = start, op.local.device, op.remote_offset, op.nbytes
    if nbytes:
        yield source, device, offset, nbytes


def batches(ops: Sequence[WriteOp], target: int, target_device: str, most_bytes: int) -> Iterator[list[Piece]]:
    """Lists of pieces of at most ``most_bytes`` together. ``target`` is where the region starts."""
    batch: list[Piece] = []
    room = most_bytes
    for source, device, offset, nbytes in merged(ops):
        done = 0
        while done < nbytes:
            size = min(nbytes - done, room)
            batch.append(Piece(source + done, device, target + offset + done, target_device, size))
            done += size
            room -= size
            if not room or len(batch) == MAX_PIECES:
                yield batch
                batch, room = [], most_bytes
    if batch:
        yield batch
