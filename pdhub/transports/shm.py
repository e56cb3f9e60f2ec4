"""Shared memory on one host: a write is one copy into the node's region.

The node's memory is a ``memfd``: it has no name, so nothing is left behind however a process ends. Its descriptor
goes to a granted writer over an abstract Unix socket.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdhub.api import (
    Grant,
    OnDone,
    Peer,
    PeerMetadata,
    PluginError,
    Region,
    Transfer,
    Transport,
    TransportCaps,
    WriteOp,
)
from pdhub.transports.link import Links
from pdhub.transports.posting import Posting, refused
from pdhub.transports.regions import Regions, is_cpu, release
from pdhub.transports.shm_target import ShmTarget
from pdhub.transports.shm_wire import NAME, TOKEN_BYTES, make_metadata, read_metadata
from pdhub.transports.shm_writer import ShmLink, ShmPeer

if TYPE_CHECKING:
    from pdhub.transports.plugin import ShmConfig

MAX_OPS = 65_536


class ShmTransport(Transport):
    """See the module. ``register`` makes sources only: private memory cannot be shared after the fact."""

    name = NAME

    def __init__(self, config: ShmConfig) -> None:
        self._config = config
        self._regions = Regions(MAX_OPS)
        self._target = ShmTarget(config.warm_bytes)
        self._links: Links[str, ShmLink] = Links()

    def open(self) -> TransportCaps:
        if not sys.platform.startswith("linux"):
            raise PluginError("the shm transport needs Linux", hint="use the tcp transport")
        return TransportCaps(
            remote=False,
            notify_ordered=False,
            fence_within_s=0.5,
            fences_by="detachment: the fenced region's memory is never read or used again once a writer has opened it",
            max_ops=MAX_OPS,
        )

    def allocate(self, nbytes: int, device: str = "cpu") -> Region:
        if not is_cpu(device):
            raise ValueError(f"shm has cpu memory only, not {device}")
        if nbytes <= 0:
            raise ValueError("a region needs at least one byte")
        region_id = self._regions.new_id()
        memory = self._target.allocate(region_id, nbytes)
        region = Region(region_id, memory.address, nbytes, view=memoryview(memory.map)[:nbytes], owner=memory.map)
        self._regions.add(region)
        return region

    def register(self, region: Region) -> Region:
        return self._regions.adopt(region)

    def unregister(self, region_id: str) -> None:
        region = self._regions.remove(region_id)
        release(region)
        self._target.free(region_id)

    def export_metadata(self) -> PeerMetadata:
        return make_metadata(self._target.serve())

    def connect(self, peer: PeerMetadata) -> Peer:
        address = read_metadata(peer)
        return ShmPeer(self._links.get(address, lambda: ShmLink(address, self._config.timeout_s)))

    def grant(self, region_id: str, writer: str) -> Grant:
        region = self._regions.get(region_id)
        if region is None:
            raise ValueError(f"no region {region_id!r}")
        self._target.serve()
        return Grant(region_id, region.nbytes, self._target.grant(region_id))

    def write(
        self,
        peer: Peer,
        grant: Grant,
        ops: Sequence[WriteOp],
        notify: bytes | None = None,
        on_done: OnDone | None = None,
    ) -> Transfer:
        if not isinstance(peer, ShmPeer):
            raise ValueError("this peer was not connected by shm")
        self._regions.check(grant, ops, notify)
        if len(grant.data) != TOKEN_BYTES:
            return refused("this is no grant of shm", on_done)
        posting = Posting(on_done)
        peer.post(posting, grant, tuple(ops))
        return posting

    def fence(self, region_id: str, within_s: float) -> bool:
        self._target.fence(region_id)
        return True

    def close(self) -> None:
        self._links.close()
        self._regions.clear()
        self._target.close()
