"""Plain TCP between any two hosts: bytes are received straight into the node's region.

Unencrypted and authenticated only by unguessable grants: for a network that you trust.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from pdhub.api import Grant, OnDone, Peer, PeerMetadata, Region, Transfer, Transport, TransportCaps, WriteOp
from pdhub.transports.memory import Memory, WarmMemory, private_memory
from pdhub.transports.posting import Posting, refused
from pdhub.transports.regions import Regions, is_cpu, release
from pdhub.transports.tcp_dial import Address
from pdhub.transports.tcp_target import TcpTarget
from pdhub.transports.tcp_wire import NAME, TOKEN_BYTES, make_metadata, read_metadata
from pdhub.transports.tcp_writer import TcpPeer

if TYPE_CHECKING:
    from pdhub.transports.plugin import TcpConfig

MAX_OPS = 65_536
FENCE_WITHIN_S = 2.0


class TcpTransport(Transport):
    """See the module. Registered memory can be a source and a target."""

    name = NAME

    def __init__(self, config: TcpConfig) -> None:
        self._config = config
        self._regions = Regions(MAX_OPS)
        self._memory: dict[str, Memory] = {}
        self._warm = WarmMemory(private_memory, config.warm_bytes)
        self._target = TcpTarget(
            config.host, config.port, config.timeout_s, config.max_connections, config.buffer_bytes
        )  # fmt: skip
        self._peers: list[TcpPeer] = []

    def open(self) -> TransportCaps:
        return TransportCaps(
            remote=True,
            notify_ordered=False,
            fence_within_s=FENCE_WITHIN_S,
            fences_by="its connections are shut down and their receiving threads have ended",
            max_ops=MAX_OPS,
        )

    def allocate(self, nbytes: int, device: str = "cpu") -> Region:
        if not is_cpu(device):
            raise ValueError(f"tcp has cpu memory only, not {device}")
        if nbytes <= 0:
            raise ValueError("a region needs at least one byte")
        region_id = self._regions.new_id()
        memory = self._warm.take(nbytes)
        self._memory[region_id] = memory
        region = Region(region_id, memory.address, nbytes, view=memoryview(memory.map)[:nbytes], owner=memory.map)
        self._regions.add(region)
        return region

    def register(self, region: Region) -> Region:
        return self._regions.adopt(region)

    def unregister(self, region_id: str) -> None:
        region = self._regions.remove(region_id)
        memory = self._memory.pop(region_id, None)
        if memory is not None:
            self._target.free(region_id, partial(self._reuse, region, memory))
        else:  # the caller's own memory, which it may free when this returns
            self._target.revoke(region_id, FENCE_WITHIN_S)
            self._target.free(region_id, _nothing)

    def _reuse(self, region: Region | None, memory: Memory) -> None:
        release(region)
        self._warm.give(memory)

    def export_metadata(self) -> PeerMetadata:
        return make_metadata(self._config.advertise or self._config.host, self._target.serve())

    def connect(self, peer: PeerMetadata) -> Peer:
        host, port = read_metadata(peer)
        connected = TcpPeer(Address(host, port, self._config.timeout_s, self._config.buffer_bytes))
        self._peers = [known for known in self._peers if not known.closed] + [connected]
        return connected

    def grant(self, region_id: str, writer: str) -> Grant:
        region = self._regions.get(region_id)
        if region is None:
            raise ValueError(f"no region {region_id!r}")
        self._target.serve()
        return Grant(region_id, region.nbytes, self._target.grant(region))

    def write(
        self,
        peer: Peer,
        grant: Grant,
        ops: Sequence[WriteOp],
        notify: bytes | None = None,
        on_done: OnDone | None = None,
    ) -> Transfer:
        if not isinstance(peer, TcpPeer):
            raise ValueError("this peer was not connected by tcp")
        self._regions.check(grant, ops, notify)
        if len(grant.data) != TOKEN_BYTES:
            return refused("this is no grant of tcp", on_done)
        posting = Posting(on_done, abort_within_s=2.0)
        peer.post(posting, grant, tuple(ops))
        return posting

    def fence(self, region_id: str, within_s: float) -> bool:
        return self._target.revoke(region_id, within_s)

    def close(self) -> None:
        peers, self._peers = self._peers, []
        for peer in peers:
            peer.close()
        self._target.close()
        self._regions.clear()
        while self._memory:
            _, memory = self._memory.popitem()
            memory.drop()
        self._warm.close()


def _nothing() -> None:
    return None
