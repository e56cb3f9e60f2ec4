"""A transport that goes wrong on purpose: what a network, a dying process or a careless plugin does to a hand-over."""

from __future__ import annotations

import ctypes
import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pdhub.api import (
    Grant,
    OnDone,
    Peer,
    PeerMetadata,
    Region,
    Transfer,
    TransferFailed,
    TransferState,
    Transport,
    TransportCaps,
    WriteOp,
)
from pdhub.transports.posting import Posting

LATE_S = 0.02
"""How long after the claim that nothing can land any more a late write lands."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Which faults, and how often: 0 never, 1 always, else the probability for one write.

    The first three are legal (a correct host must bear them); the others break the contract.

    Args:
        delay_s: a write starts up to so many seconds late.
        reorder: a write's operations are shuffled, and it is held back so that the next ones overtake it.
        fail: a write fails with TransferFailed and moves nothing.
        drop: a write is lost silently: it stays posted until it is aborted or the peer is closed.
        lose: one operation is left out, yet the write is done.
        flip: one bit of one operation arrives changed.
        duplicate_done: ``on_done`` is called twice.
        lying_abort: ``abort`` is True at once, and the write goes on.
        late_write: the write lands after ``abort`` was True; at the target: ``fence`` is True and revokes nothing.
        vanish_after: after so many writes the target is silent: nothing ends, no abort can be proven.
    """

    delay_s: float = 0.0
    reorder: float = 0.0
    fail: float = 0.0
    drop: float = 0.0
    lose: float = 0.0
    flip: float = 0.0
    duplicate_done: float = 0.0
    lying_abort: float = 0.0
    late_write: float = 0.0
    vanish_after: int | None = None


class FaultyPeer(Peer):
    """Remembers transfers that will never end by themselves."""

    def __init__(self, inner: Peer) -> None:
        self.inner = inner
        self.silent: list[FaultyTransfer] = []

    def prepare(self, grant: Grant) -> None:
        self.inner.prepare(grant)

    def close(self) -> None:
        self.inner.close()
        for transfer in self.silent:
            transfer.finish(TransferState.FAILED, TransferFailed("the peer was closed"))


class FaultyTransfer(Posting):
    """A transfer as the faults show it."""

    def __init__(self, owner: FaultyTransport, on_done: OnDone | None, again: bool) -> None:
        super().__init__(on_done)
        self._owner = owner
        self._again = on_done if again else None
        self.inner: Transfer | None = None
        self.starting = threading.RLock()
        """Held while a late write is posted, so that an abort finds it either held back or posted."""
        self.lies = False
        self.resend: Callable[[], object] | None = None
        self.unprovable = False

    def abort(self) -> bool:
        if self.state is not TransferState.POSTED:
            return self.state is not TransferState.FAILED
        if self.unprovable:
            return False
        if self.lies:
            self.finish(TransferState.ABORTED)
            return True
        with self.starting:
            if self.inner is None:  # held back or dropped
                return super().abort()
        stopped = self.inner.abort()
        if self.resend is not None:
            self._owner.later(LATE_S, self.resend)
            self.finish(TransferState.ABORTED)
            return True
        return stopped

    def finished(self, inner: Transfer) -> None:
        """``on_done`` of the real transfer."""
        self.finish(inner.state, inner.error)
        if self._again is not None:
            self._again(self)


class FaultyTransport(Transport):
    """Wraps ``inner``; either side, or both, may be wrapped.

    Args:
        faults: what goes wrong.
        rng: decides when; seed it to repeat a run.
    """

    def __init__(self, inner: Transport, faults: Faults, rng: random.Random | None = None) -> None:
        self.name = inner.name
        self.inner = inner
        self.faults = faults
        self._rng = rng or random.Random(0)
        self._changed = threading.Condition()
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._writes = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._caps = TransportCaps()
        self._regions: set[str] = set()

    def open(self) -> TransportCaps:
        self._caps = self.inner.open()
        return self._caps

    def allocate(self, nbytes: int, device: str = "cpu") -> Region:
        return self._known(self.inner.allocate(nbytes, device))

    def register(self, region: Region) -> Region:
        return self._known(self.inner.register(region))

    def unregister(self, region_id: str) -> None:
        self._regions.discard(region_id)
        self.inner.unregister(region_id)

    def export_metadata(self) -> PeerMetadata:
        return PeerMetadata(self.name, self.inner.export_metadata().data)

    def connect(self, peer: PeerMetadata) -> Peer:
        if peer.transport != self.name:
            raise TransferFailed(f"the target speaks {peer.transport!r}, this side {self.name!r}")
        # a wrapper under a name of its own must not look like another transport to what it wraps
        return FaultyPeer(self.inner.connect(PeerMetadata(self.inner.name, peer.data)))

    def grant(self, region_id: str, writer: str) -> Grant:
        return self.inner.grant(region_id, writer)

    def fence(self, region_id: str, within_s: float) -> bool:
        if self._hit(self.faults.late_write):
            return True
        return self.inner.fence(region_id, within_s)

    def write(
        self,
        peer: Peer,
        grant: Grant,
        ops: Sequence[WriteOp],
        notify: bytes | None = None,
        on_done: OnDone | None = None,
    ) -> Transfer:
        if not isinstance(peer, FaultyPeer):
            raise ValueError("connect through the same wrapper")
        self._check(grant, ops, notify)
        faults = self.faults
        transfer = FaultyTransfer(self, on_done, again=self._hit(faults.duplicate_done))
        with self._changed:
            self._writes += 1
            vanished = faults.vanish_after is not None and self._writes > faults.vanish_after
        if vanished or self._hit(faults.drop):
            transfer.unprovable = vanished
            peer.silent.append(transfer)
            return transfer
        if self._hit(faults.fail):
            transfer.finish(TransferState.FAILED, TransferFailed("injected failure"))
            return transfer
        transfer.lies = self._hit(faults.lying_abort)
        sent, scratch = self._spoil(list(ops))
        if self._hit(faults.late_write):
            transfer.resend = partial(self.inner.write, peer.inner, grant, sent)
        start = partial(self._start, transfer, peer.inner, grant, sent, scratch)
        wait_s = self._rng.uniform(0, faults.delay_s)
        if self._hit(faults.reorder):
            self._rng.shuffle(sent)
            wait_s += self._rng.uniform(0, 0.01)
        if wait_s > 0:
            self.later(wait_s, start)
        else:
            start()
        return transfer

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        self.inner.close()

    def later(self, wait_s: float, what: Callable[[], object]) -> None:
        """Call ``what`` in the wrapper's own thread; when it is closed, at once."""
        with self._changed:
            heapq.heappush(self._queue, (time.monotonic() + wait_s, next(self._numbers), what))
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="pdhub faults", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if not self._queue:
                    return
                due, _, what = self._queue[0]
                left = due - time.monotonic()
                if left > 0 and not self._closed:
                    self._changed.wait(left)
                    continue
                heapq.heappop(self._queue)
            what()

    def _start(
        self, transfer: FaultyTransfer, peer: Peer, grant: Grant, ops: Sequence[WriteOp], scratch: Region | None
    ) -> None:
        def finished(inner: Transfer) -> None:
            transfer.finished(inner)
            if scratch is not None and transfer.resend is None:
                self.later(0, partial(self.inner.unregister, scratch.id))

        with transfer.starting:
            if not transfer.begin():
                return
            try:
                transfer.inner = self.inner.write(peer, grant, ops, on_done=finished)
            except ValueError as error:  # found out late only because the write was delayed
                transfer.finish(TransferState.FAILED, TransferFailed(str(error)))

    def _spoil(self, ops: list[WriteOp]) -> tuple[list[WriteOp], Region | None]:
        if ops and self._hit(self.faults.lose):
            ops.pop(self._rng.randrange(len(ops)))
        full = [index for index, op in enumerate(ops) if op.nbytes]
        if not full or not self._hit(self.faults.flip):
            return ops, None
        index = self._rng.choice(full)
        op = ops[index]
        scratch = self.inner.allocate(op.nbytes)
        ctypes.memmove(scratch.address, op.local.address + op.local_offset, op.nbytes)
        at = scratch.address + self._rng.randrange(op.nbytes)
        ctypes.c_uint8.from_address(at).value ^= 1 << self._rng.randrange(8)
        ops[index] = replace(op, local=scratch, local_offset=0)
        return ops, scratch

    def _check(self, grant: Grant, ops: Sequence[WriteOp], notify: bytes | None) -> None:
        """A delayed write must still refuse bad operations at once."""
        if notify is not None and not self._caps.notify_ordered:
            raise ValueError("this transport does not carry notifications")
        if self._caps.max_ops and len(ops) > self._caps.max_ops:
            raise ValueError("too many operations")
        for op in ops:
            if op.local.id not in self._regions:
                raise ValueError(f"source region {op.local.id!r} is not registered here")
            inside = 0 <= op.local_offset <= op.local.nbytes - op.nbytes
            if op.nbytes < 0 or not inside or not 0 <= op.remote_offset <= grant.nbytes - op.nbytes:
                raise ValueError("operation leaves its region")

    def _known(self, region: Region) -> Region:
        self._regions.add(region.id)
        return region

    def _hit(self, probability: float) -> bool:
        if probability <= 0:
            return False
        with self._changed:
            return self._rng.random() < probability
