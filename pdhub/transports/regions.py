"""Which memory this side has registered, and whether an operation stays inside it."""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from pdhub.api import Grant, Region, WriteOp


def is_cpu(device: str) -> bool:
    return device == "cpu"


def release(region: Region | None) -> None:
    """Give up this process's view of memory that is used no more."""
    if region is not None and isinstance(region.view, memoryview):
        with contextlib.suppress(BufferError):  # somebody still looks at it: the memory is then not used again
            region.view.release()


class Regions:
    """Regions of one transport instance. Thread-safe. Ids never repeat, in this or any other instance."""

    def __init__(self, max_ops: int) -> None:
        self._max_ops = max_ops
        self._prefix = secrets.token_hex(4)
        self._numbers = count(1)
        self._known: dict[str, Region] = {}
        self._lock = threading.Lock()

    def new_id(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"

    def add(self, region: Region) -> None:
        with self._lock:
            self._known[region.id] = region

    def adopt(self, region: Region) -> Region:
        """Register the caller's own memory under an id of ours. Raises ValueError if it cannot be used."""
        if not is_cpu(region.device):
            raise ValueError(f"only cpu memory can be registered, not {region.device}")
        if region.nbytes <= 0:
            raise ValueError("a region needs at least one byte")
        view = region.view
        if view is None:
            if not region.address:
                raise ValueError("a region needs an address or a view")
            view = memoryview((ctypes.c_char * region.nbytes).from_address(region.address)).cast("B")
        elif view.readonly or not view.contiguous or view.nbytes < region.nbytes:
            raise ValueError("a region's view must be writable, contiguous and as long as the region")
        else:
            view = view.cast("B")[: region.nbytes]
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        if region.address and region.address != address:
            raise ValueError("the region's address is not where its view starts")
        adopted = replace(region, id=self.new_id(), address=address, view=view)
        self.add(adopted)
        return adopted

    def get(self, region_id: str) -> Region | None:
        with self._lock:
            return self._known.get(region_id)

    def remove(self, region_id: str) -> Region | None:
        with self._lock:
            return self._known.pop(region_id, None)

    def clear(self) -> None:
        with self._lock:
            self._known.clear()

    def check(self, grant: Grant, ops: Sequence[WriteOp], notify: bytes | None) -> None:
        """Raise ValueError unless every operation stays inside its source and the granted region."""
        if notify is not None:
            raise ValueError("this transport does not carry notifications (notify_ordered is False)")
        if len(ops) > self._max_ops:
            raise ValueError(f"{len(ops)} operations in a write; at most {self._max_ops}")
        for op in ops:
            known = self.get(op.local.id)
            if known is None or known.address != op.local.address:
                raise ValueError(f"source region {op.local.id!r} is not registered here")
            if op.nbytes < 0 or op.local_offset < 0 or op.remote_offset < 0:
                raise ValueError("sizes and offsets cannot be negative")
            if op.local_offset + op.nbytes > known.nbytes:
                raise ValueError(f"operation leaves its source region of {known.nbytes} bytes")
            if op.remote_offset + op.nbytes > grant.nbytes:
                raise ValueError(f"operation leaves the granted region of {grant.nbytes} bytes")
