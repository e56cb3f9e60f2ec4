"""A transport inside one process: for kits and tests that are about engines, not about transports."""

from __future__ import annotations

import ctypes
import itertools
import secrets
from collections.abc import Sequence

from pdhub.api import (
    Grant,
    OnDone,
    Peer,
    PeerMetadata,
    Region,
    Transfer,
    TransferState,
    Transport,
    TransportCaps,
    WriteOp,
)

_OPEN: dict[str, MemoryTransport] = {}


class MemoryPeer(Peer):
    def __init__(self, target: MemoryTransport) -> None:
        self.target = target

    def close(self) -> None:
        return None


class MemoryTransfer(Transfer):
    """Finished when it is made: the copy is done by the caller's thread."""

    @property
    def state(self) -> TransferState:
        return TransferState.DONE

    @property
    def error(self) -> BaseException | None:
        return None

    def wait(self, timeout_s: float | None = None) -> TransferState:
        return TransferState.DONE

    def abort(self) -> bool:
        return True


class MemoryTransport(Transport):
    """Regions are bytearrays; a write is a slice assignment; ``fence`` forgets the grants."""

    name = "memory"

    def __init__(self) -> None:
        self._id = secrets.token_hex(8)
        self._count = itertools.count(1)
        self.regions: dict[str, Region] = {}
        self.grants: dict[bytes, str] = {}

    def open(self) -> TransportCaps:
        _OPEN[self._id] = self
        return TransportCaps(fences_by="grants are looked up on every write, in one process")

    def allocate(self, nbytes: int, device: str = "cpu") -> Region:
        if device != "cpu":
            raise ValueError("host memory only")
        data = bytearray(nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(data)) if nbytes else 0
        return self.register(Region("", address, nbytes, "cpu", memoryview(data), data))

    def register(self, region: Region) -> Region:
        made = Region(
            f"{self._id}-{next(self._count)}", region.address, region.nbytes, "cpu", region.view, region.owner
        )
        self.regions[made.id] = made
        return made

    def unregister(self, region_id: str) -> None:
        self.fence(region_id, 0)
        self.regions.pop(region_id, None)

    def export_metadata(self) -> PeerMetadata:
        return PeerMetadata(self.name, self._id.encode())

    def connect(self, peer: PeerMetadata) -> Peer:
        return MemoryPeer(_OPEN[peer.data.decode()])

    def grant(self, region_id: str, writer: str) -> Grant:
        token = secrets.token_bytes(16)
        self.grants[token] = region_id
        return Grant(region_id, self.regions[region_id].nbytes, token)

    def write(
        self,
        peer: Peer,
        grant: Grant,
        ops: Sequence[WriteOp],
        notify: bytes | None = None,
        on_done: OnDone | None = None,
    ) -> Transfer:
        assert isinstance(peer, MemoryPeer)
        target = peer.target.regions[peer.target.grants[grant.data]].view
        assert target is not None
        for op in ops:
            if op.remote_offset < 0 or op.remote_offset + op.nbytes > grant.nbytes:
                raise ValueError("outside the granted region")
            assert op.local.view is not None
            piece = op.local.view[op.local_offset : op.local_offset + op.nbytes]
            target[op.remote_offset : op.remote_offset + op.nbytes] = piece
        transfer = MemoryTransfer()
        if on_done is not None:
            on_done(transfer)
        return transfer

    def fence(self, region_id: str, within_s: float) -> bool:
        self.grants = {token: region for token, region in self.grants.items() if region != region_id}
        return True

    def close(self) -> None:
        _OPEN.pop(self._id, None)
        self.regions.clear()
