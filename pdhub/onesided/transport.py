"""A transport over a one-sided library: the contract of :class:`pdhub.api.Transport`, with the rights added."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from pdhub.api import Grant, OnDone, Peer, PeerMetadata, Region, Transfer, Transport, TransportCaps, WriteOp
from pdhub.onesided.device import DeviceMemory, DeviceStock, host_copy
from pdhub.onesided.landings import Landings
from pdhub.onesided.link import GIVE_UP_S, OneSidedLink, OneSidedPeer
from pdhub.onesided.memory import HostMemory, HostStock
from pdhub.onesided.native import Native
from pdhub.onesided.options import OneSidedConfig
from pdhub.onesided.server import Server
from pdhub.onesided.wire import TOKEN_BYTES, Address
from pdhub.transports.link import Links
from pdhub.transports.posting import Posting, refused
from pdhub.transports.regions import Regions, is_cpu, release

MAX_OPS = 65_536


class OneSidedTransport(Transport):
    """Registered memory is a source only: memory of the caller's cannot be put out of a lost writer's reach.

    Args:
        name: the plugin's.
        native: the library.
        config: options that all such transports have.
        fences_by: how the library helps, added to what is said of a fence.
    """

    def __init__(self, name: str, native: Native, config: OneSidedConfig, fences_by: str) -> None:
        self.name = name
        self._native = native
        self._config = config
        self._fences_by = fences_by
        self._instance = secrets.token_bytes(TOKEN_BYTES)
        self._regions = Regions(MAX_OPS)
        self._landings = Landings()
        self._server = Server(
            name, config.host, config.port, self._instance, config.max_writers, self._landings
        )  # fmt: skip
        self._host_memory = HostStock(native, config.warm_bytes)
        self._device_memory = DeviceStock(native, config.aside_bytes, config.device_warm_bytes)
        self._sources: dict[str, object] = {}
        self._links: Links[bytes, OneSidedLink] = Links()
        self._opened = False

    def open(self) -> TransportCaps:
        self._native.open()
        self._opened = True
        return TransportCaps(
            devices=self._native.devices,
            remote=self._native.remote,
            notify_ordered=False,
            fence_within_s=2.0,
            fences_by=f"every writer says that it has stopped, else the memory is detached: {self._fences_by}",
            max_ops=MAX_OPS,
        )

    def allocate(self, nbytes: int, device: str = "cpu") -> Region:
        if nbytes <= 0:
            raise ValueError("a region needs at least one byte")
        if device.partition(":")[0] not in self._native.devices:
            raise ValueError(f"{self.name} has no {device} memory here")
        held: HostMemory | DeviceMemory
        view: memoryview | None = None
        owner: object
        if is_cpu(device):
            held = self._host_memory.take(nbytes)
            owner, view = held.memory.map, memoryview(held.memory.map)[:nbytes]
        else:
            held = self._device_memory.take(nbytes, device)
            owner = held.tensor
        region = Region(self._regions.new_id(), held.address, nbytes, held.device, view, owner)
        self._landings.add(region.id, held, nbytes)
        self._regions.add(region)
        return region

    def register(self, region: Region) -> Region:
        if is_cpu(region.device):
            adopted = self._regions.adopt(region)
        elif region.device.partition(":")[0] in self._native.devices and region.address and region.nbytes > 0:
            adopted = replace(region, id=self._regions.new_id())
            self._regions.add(adopted)
        else:
            raise ValueError(f"{self.name} cannot use this {region.device} memory")
        try:
            self._sources[adopted.id] = self._native.register(adopted.address, adopted.nbytes, adopted.device)
        except ValueError:
            self._regions.remove(adopted.id)
            raise
        return adopted

    def read(self, region: Region) -> memoryview | None:
        return region.view if is_cpu(region.device) else host_copy(region)

    def unregister(self, region_id: str) -> None:
        region = self._regions.remove(region_id)
        source = self._sources.pop(region_id, None)
        if source is not None:
            self._native.deregister(source)
        elif region is not None:
            self._landings.free(region_id, partial(release, region))

    def export_metadata(self) -> PeerMetadata:
        host, port = self._config.advertise or self._config.host, self._server.serve()
        return Address(host, port, self._instance, self._native.describe()).pack(self.name)

    def connect(self, peer: PeerMetadata) -> Peer:
        address = Address.unpack(self.name, peer)
        make = partial(
            OneSidedLink,
            self.name,
            address,
            self._native.connect,
            self._config.timeout_s,
            self._config.piece_bytes,
            self._config.pieces_in_flight,
        )
        return OneSidedPeer(self._links.get(address.instance, make))

    def grant(self, region_id: str, writer: str) -> Grant:
        region = self._regions.get(region_id)
        if region is None:
            raise ValueError(f"no region {region_id!r}")
        self._server.serve()
        return Grant(region_id, region.nbytes, self._landings.grant(region_id))

    def write(
        self,
        peer: Peer,
        grant: Grant,
        ops: Sequence[WriteOp],
        notify: bytes | None = None,
        on_done: OnDone | None = None,
    ) -> Transfer:
        if not isinstance(peer, OneSidedPeer):
            raise ValueError(f"this peer was not connected by {self.name}")
        self._regions.check(grant, ops, notify)
        if len(grant.data) != TOKEN_BYTES:
            return refused(f"this is no grant of {self.name}", on_done)
        posting = Posting(on_done, abort_within_s=GIVE_UP_S + 0.5)
        peer.post(posting, grant, tuple(ops))
        return posting

    def fence(self, region_id: str, within_s: float) -> bool:
        return self._landings.fence(region_id, within_s)

    def close(self) -> None:
        self._links.close()
        self._server.close()
        if not self._opened:
            return
        self._opened = False
        self._landings.close()
        self._regions.clear()
        self._native.close()
        self._host_memory.close()
        self._device_memory.close()
