"""The KV transport contract: one-sided writes from prefill into a node's memory.

A transport is *synchronous and thread-safe*: the sender has no event loop, the node bridges to asyncio.
Both sides open one instance. The node :meth:`~Transport.allocate`\\ s (or :meth:`~Transport.register`\\ s) one
region a landing, :meth:`~Transport.grant`\\ s it to a writer that joined, and takes the right back with
:meth:`~Transport.fence`. The sender :meth:`~Transport.connect`\\ s, then :meth:`~Transport.write`\\ s.

What every transport must keep (the kit ``pdhub.testing.TransportConformance`` proves each rule):

* bytes reported as done are visible at the target, whole and unchanged, and nothing else was touched;
* a timeout is not a stop: only ``abort() is True`` or ``fence() is True`` promise that no byte can still land;
* after ``fence() is True`` a writer that was stopped, is slow or lies changes nothing that the node ever reads;
* native progress runs in the plugin's own thread and sleeps when idle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class TransferState(StrEnum):
    POSTED = "posted"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class TransportCaps:
    """What an opened transport can do; absent means no.

    Args:
        devices: kinds of memory that regions may live in (``cpu``, ``cuda``).
        remote: True if the two sides may be on different hosts.
        notify_ordered: True if ``notify`` reaches the target after the bytes of its write; then it *is*
            the done message, otherwise the control channel carries it.
        fence_within_s: how long :meth:`Transport.fence` needs at most when the machine is healthy.
        fences_by: one sentence: how revocation is proven.
        max_ops: most operations a single write takes; 0 for no limit.
    """

    devices: frozenset[str] = frozenset({"cpu"})
    remote: bool = False
    notify_ordered: bool = False
    fence_within_s: float = 1.0
    fences_by: str = ""
    max_ops: int = 0


@dataclass(frozen=True, slots=True)
class Region:
    """A byte range of registered memory on this side.

    Args:
        id: unique in this transport instance, never reused.
        address: start address in this process.
        nbytes: length.
        device: ``cpu`` or ``cuda:N``.
        view: writable bytes for ``cpu`` regions; None for device memory.
        owner: whatever must stay alive as long as the region (a tensor, a mapping).
    """

    id: str
    address: int
    nbytes: int
    device: str = "cpu"
    view: memoryview | None = field(default=None, compare=False, repr=False)
    owner: object = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PeerMetadata:
    """What a writer needs to reach a transport instance: opaque bytes and the plugin that reads them."""

    transport: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Grant:
    """The right to write into one region, for one writer and one generation of the lease.

    It travels in the accept message, never earlier. Opaque to the host.
    """

    region_id: str
    nbytes: int
    data: bytes


@dataclass(frozen=True, slots=True)
class WriteOp:
    """Copy ``nbytes`` from ``local`` (at ``local_offset``) to the granted region (at ``remote_offset``)."""

    local: Region
    local_offset: int
    remote_offset: int
    nbytes: int


class Peer(ABC):
    """A connected target. Thread-safe."""

    def prepare(self, grant: Grant) -> None:
        """Writes with this grant will come: settle now what the first of them would wait for, such as opening the
        region. Returns at once and never fails: a grant of no use shows in the write. Optional."""

    @abstractmethod
    def close(self) -> None:
        """Forget the target. Idempotent; transfers still posted to it fail."""


class Transfer(ABC):
    """One posted write. Thread-safe."""

    @property
    @abstractmethod
    def state(self) -> TransferState:
        """Current state; never goes back from done, failed or aborted."""

    @property
    @abstractmethod
    def error(self) -> BaseException | None:
        """Why it failed; None in any other state."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> TransferState:
        """Block until the bytes are visible to the target, or it failed, or ``timeout_s`` passed.

        Returns the state then. ``posted`` after a timeout means *not stopped*.
        """

    @abstractmethod
    def abort(self) -> bool:
        """Try to stop. True only if no byte of this transfer can land any more."""


OnDone = Callable[[Transfer], None]


class Transport(ABC):
    """See the module's text. ``name`` is the plugin's name, as in :class:`Grant` and :class:`PeerMetadata`."""

    name: str

    @abstractmethod
    def open(self) -> TransportCaps:
        """Called once, before anything else. Raises :class:`~pdhub.api.errors.PluginError` with a hint if the
        native library or device is missing."""

    @abstractmethod
    def allocate(self, nbytes: int, device: str = "cpu") -> Region:
        """Memory that peers can be granted. The content is undefined. Raises ``MemoryError`` if there is none,
        ``ValueError`` if this transport cannot use the device."""

    def allocate_all(self, nbytes: int, devices: Iterable[str]) -> tuple[Region, ...]:
        """One region of ``nbytes`` on each device, or none at all: raises what :meth:`allocate` raises."""
        regions: list[Region] = []
        try:
            for device in devices:
                regions.append(self.allocate(nbytes, device))
        except (MemoryError, ValueError):
            for region in regions:
                self.unregister(region.id)
            raise
        return tuple(regions)

    def reaches(self, device: str) -> bool:
        """Whether landings can be allocated there."""
        try:
            self.unregister(self.allocate(1, device).id)
        except ValueError:
            return False
        return True

    @abstractmethod
    def register(self, region: Region) -> Region:
        """Make the caller's own memory usable as a source (and as a target where the transport can).

        Returns the region to use in :class:`WriteOp`. Raises ``ValueError`` if this memory cannot be used.
        """

    def read(self, region: Region) -> memoryview | None:
        """A region of this side as bytes of host memory: its view, or a copy of what is on a device. None if it cannot
        be read. May block; for digests and measurements."""
        return region.view

    @abstractmethod
    def unregister(self, region_id: str) -> None:
        """Free an allocated region or forget a registered one. Idempotent. Only after every transfer from it
        ended and, for a target, after every writer left or was fenced."""

    @abstractmethod
    def export_metadata(self) -> PeerMetadata:
        """How to reach this instance; stable for its life; no secret of any landing in it."""

    @abstractmethod
    def connect(self, peer: PeerMetadata) -> Peer:
        """Reach a target. Raises :class:`~pdhub.api.errors.TransferFailed` if it cannot be reached."""

    @abstractmethod
    def grant(self, region_id: str, writer: str) -> Grant:
        """At the target: let ``writer`` write into the region until it is fenced or unregistered."""

    @abstractmethod
    def write(
        self,
        peer: Peer,
        grant: Grant,
        ops: Sequence[WriteOp],
        notify: bytes | None = None,
        on_done: OnDone | None = None,
    ) -> Transfer:
        """Post a write; returns at once. ``ValueError`` if an operation leaves the granted region.

        Args:
            notify: delivered to the target after the bytes, if the transport orders it (``notify_ordered``).
            on_done: called exactly once, from any thread, when the state is final. Must not block.

        The source must stay unchanged until the state is done, failed with the peer closed, or aborted.
        """

    @abstractmethod
    def fence(self, region_id: str, within_s: float) -> bool:
        """At the target: revoke every grant of the region. True if no write can reach it any more.

        Where memory cannot be taken back from a writer that holds a mapping, the region is *detached*: late
        writes land in memory that nobody reads. After True the region only awaits :meth:`unregister`.
        False: not proven within ``within_s`` seconds; the node then drains and restarts.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent."""
