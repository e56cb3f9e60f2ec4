"""Broken transports, each with one mistake. Built over shm; those whose mistake needs another process register here."""

import atexit
import contextlib
import ctypes
import os
import random
import secrets
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from pdhub.api import Grant, Peer, Region, Transfer, TransferFailed, TransferState, TransportSpec, WriteOp, hookimpl
from pdhub.testing.faults import Faults, FaultyTransport
from pdhub.transports.plugin import ShmConfig
from pdhub.transports.posting import Posting
from pdhub.transports.shm import ShmTransport

NAMED = "pdhub-mutant-"


def faulty(**faults):
    """A mutant made of injected faults."""

    def make(config):
        return FaultyTransport(ShmTransport(config), Faults(**faults), random.Random(7))

    make.__name__ = "faulty_" + "_".join(faults)
    return make


class Mutant(ShmTransport):
    """Base: real writes go through :meth:`real`."""

    def real(self, peer, grant, ops, on_done=None):
        return super().write(peer, grant, ops, None, on_done)


class Stuck(Posting):
    """A transfer that never ends."""

    def abort(self):
        return False


class EarlyDone(Mutant):
    def write(self, peer, grant, ops, notify=None, on_done=None):
        posting = Posting(on_done)

        def later():
            time.sleep(0.02)
            with contextlib.suppress(ValueError):  # the test was faster
                self.real(peer, grant, ops)

        threading.Thread(target=later, daemon=True).start()
        posting.finish(TransferState.DONE)
        return posting


class OneByteMore(Mutant):
    def write(self, peer, grant, ops, notify=None, on_done=None):
        def longer(op):
            fits = op.remote_offset + op.nbytes < grant.nbytes and op.local_offset > 0
            return replace(op, local_offset=op.local_offset - 1, nbytes=op.nbytes + 1) if fits else op

        return self.real(peer, grant, [longer(op) for op in ops], on_done)


class NoWriterCheck(Mutant):
    def write(self, peer, grant, ops, notify=None, on_done=None):
        try:
            return self.real(peer, grant, ops, on_done)
        except ValueError as error:
            posting = Posting(on_done)
            posting.finish(TransferState.FAILED, TransferFailed(str(error)))
            return posting


class ClampsSilently(Mutant):
    def write(self, peer, grant, ops, notify=None, on_done=None):
        limit = self.sizes.get(grant.region_id, grant.nbytes)
        kept = [
            replace(
                op, nbytes=max(0, min(op.nbytes, limit - op.remote_offset)), remote_offset=min(op.remote_offset, limit)
            )
            for op in ops
        ]
        return self.real(peer, grant, kept, on_done)

    sizes: ClassVar[dict[str, int]] = {}

    def grant(self, region_id, writer):
        grant = super().grant(region_id, writer)
        self.sizes[region_id] = grant.nbytes
        return grant


class EmptyNeverEnds(Mutant):
    def write(self, peer, grant, ops, notify=None, on_done=None):
        return self.real(peer, grant, ops, on_done) if ops else Stuck(on_done)


class NoOpsLimit(Mutant):
    def write(self, peer, grant, ops, notify=None, on_done=None):
        return self.real(peer, grant, ops[: self.open().max_ops], on_done)


class OneMemory(Mutant):
    def allocate(self, nbytes, device="cpu"):
        self.memory = getattr(self, "memory", None) or super().allocate(8 << 20)
        return replace(super().allocate(nbytes), address=self.memory.address)


class SharedScratch(Mutant):
    def write(self, peer, grant, ops, notify=None, on_done=None):
        if not hasattr(self, "scratch"):
            self.scratch = self.allocate(8 << 20)
        (op,) = ops
        ctypes.memmove(self.scratch.address, op.local.address + op.local_offset, op.nbytes)
        time.sleep(0.002)
        return self.real(peer, grant, [replace(op, local=self.scratch, local_offset=0)], on_done)


class OneGrant(Mutant):
    def grant(self, region_id, writer):
        grant = super().grant(region_id, writer)
        seen = self.__dict__.setdefault("seen", set())
        if region_id in seen:
            return replace(grant, data=secrets.token_bytes(len(grant.data)))
        seen.add(region_id)
        return grant


class AcceptsAnyMemory(Mutant):
    def register(self, region):
        copy = bytearray(region.view)
        copy.extend(bytes(region.nbytes))
        return super().register(Region("copy", 0, region.nbytes, view=memoryview(copy), owner=copy))


class TrustsTheLabel(Mutant):
    """Any grant that names a region opens it."""

    real_grants: ClassVar[dict[str, Grant]] = {}

    def grant(self, region_id, writer):
        grant = super().grant(region_id, writer)
        self.real_grants[region_id] = grant
        return grant

    def write(self, peer, grant, ops, notify=None, on_done=None):
        return self.real(peer, self.real_grants[grant.region_id], ops, on_done)


class LeakyMetadata(Mutant):
    granted = b""

    def grant(self, region_id, writer):
        grant = super().grant(region_id, writer)
        self.granted = self.granted or grant.data
        return grant

    def export_metadata(self):
        metadata = super().export_metadata()
        return replace(metadata, data=metadata.data + self.granted)


class Scribbles(Mutant):
    """Asks the target with a write of one byte."""

    def connect(self, peer):
        made = super().connect(peer)
        made.prepare = lambda grant: self.scribble(made, grant)
        return made

    def scribble(self, peer, grant):
        self.real(peer, grant, [WriteOp(self.allocate(1), 0, 0, 1)])


class DeadPeer(Peer):
    def close(self):
        return None


class ConnectsToAnything(Mutant):
    def connect(self, peer):
        try:
            return super().connect(peer)
        except TransferFailed:
            return DeadPeer()


class GrantOutlivesRegion(Mutant):
    def unregister(self, region_id):
        return None


class Reuses(Mutant):
    """Memory comes back at once, whatever writers do: the next region is the last one."""

    freed: Region | None = None
    regions: dict

    def allocate(self, nbytes, device="cpu"):
        self.regions = getattr(self, "regions", {})
        if self.freed is not None and self.freed.nbytes == nbytes:
            freed, self.freed = self.freed, None
            return freed
        region = super().allocate(nbytes, device)
        self.regions[region.id] = region
        return region

    def unregister(self, region_id):
        self.freed = self.regions.get(region_id)

    def fence(self, region_id, within_s):
        return True


class ReusesFenced(Mutant):
    """Tells its writers of the fence, and takes for granted that they heard it."""

    def fence(self, region_id, within_s):
        done = super().fence(region_id, within_s)
        segment = self._target._segments.get(region_id)
        if segment is not None:
            segment.spoiled = False
            segment.opened.clear()
        return done

    def unregister(self, region_id):
        segment = self._target._segments.get(region_id)
        super().unregister(region_id)
        if segment is not None:
            segment.opened.clear()
            self._target._settle(segment)


class FencesOnce(Mutant):
    def fence(self, region_id, within_s):
        seen = self.__dict__.setdefault("seen", set())
        first = region_id not in seen
        seen.add(region_id)
        return first


class NeedsGoodbye(Mutant):
    def fence(self, region_id, within_s):
        return False


class FencesEverything(Mutant):
    """To be rid of one writer it revokes them all."""

    granted: ClassVar[set[str]] = set()

    def grant(self, region_id, writer):
        self.granted.add(region_id)
        return super().grant(region_id, writer)

    def fence(self, region_id, within_s):
        return all(super(FencesEverything, self).fence(each, within_s) for each in {region_id, *self.granted})


class IgnoresDeath(Mutant):
    def write(self, peer, grant, ops, notify=None, on_done=None):
        posting = Stuck(on_done)

        def finished(transfer):
            if transfer.state is TransferState.DONE:
                posting.finish(TransferState.DONE)

        self.real(peer, grant, ops, finished)
        return posting


class NamedSegments(Mutant):
    def allocate(self, nbytes, device="cpu"):
        Path(f"/dev/shm/{NAMED}{os.getpid()}-{secrets.token_hex(4)}").write_bytes(b"x")
        return super().allocate(nbytes, device)


class DiesAtExit(Mutant):
    def close(self):
        super().close()
        if "pytest" not in sys.argv[0]:  # the writer's process; in the tests' own this would be their exit status
            atexit.register(os._exit, 139)


class CallbackUnderLock(Mutant):
    def write(self, peer, grant, ops, notify=None, on_done=None):
        lock = self.__dict__.setdefault("lock", threading.Lock())
        if not lock.acquire(timeout=0.2):
            raise RuntimeError("deadlock")

        def finished(transfer):
            with lock:
                on_done(transfer)

        try:
            return self.real(peer, grant, ops, finished if on_done else None)
        finally:
            lock.release()


class Wrapped(Transfer):
    def __init__(self, inner):
        self.inner = inner

    @property
    def state(self):
        return self.inner.state

    @property
    def error(self):
        return self.inner.error

    def wait(self, timeout_s=None):
        return self.inner.wait(timeout_s)

    def abort(self):
        return self.inner.abort()


class TimeoutStops(Mutant):
    class Transfer(Wrapped):
        def wait(self, timeout_s=None):
            state = self.inner.wait(timeout_s)
            if state is TransferState.POSTED:
                self.inner.abort()
            return state

    def write(self, peer, grant, ops, notify=None, on_done=None):
        return self.Transfer(self.real(peer, grant, ops, on_done))


class AbortRewrites(Mutant):
    class Transfer(Wrapped):
        aborted = False

        @property
        def state(self):
            return TransferState.ABORTED if self.aborted else self.inner.state

        def abort(self):
            self.aborted = True
            return self.inner.abort()

    def write(self, peer, grant, ops, notify=None, on_done=None):
        return self.Transfer(self.real(peer, grant, ops, on_done))


class QueuedAbortLies(Mutant):
    class Transfer(Wrapped):
        lied = False

        @property
        def state(self):
            return TransferState.ABORTED if self.lied else self.inner.state

        def wait(self, timeout_s=None):
            return self.state if self.lied else self.inner.wait(timeout_s)

        def abort(self):
            self.lied = True
            return True

    def write(self, peer, grant, ops: list[WriteOp], notify=None, on_done=None):
        transfer = self.real(peer, grant, ops, on_done)
        return self.Transfer(transfer) if len(ops) == 1 else transfer


class ClosesNothing(Mutant):
    class Peer(Peer):
        def __init__(self, inner):
            self.inner = inner

        def close(self):
            return None

    def connect(self, peer):
        return self.Peer(super().connect(peer))

    def write(self, peer, grant, ops, notify=None, on_done=None):
        return self.real(peer.inner, grant, ops, on_done)


class OnePeerForAll(Mutant):
    def connect(self, peer):
        self.only = getattr(self, "only", None) or super().connect(peer)
        return self.only


class SameIds(Mutant):
    def allocate(self, nbytes, device="cpu"):
        return replace(super().allocate(nbytes, device), id="region-0")


class AnyDevice(Mutant):
    def allocate(self, nbytes, device="cpu"):
        return super().allocate(nbytes)


class IgnoresNotify(Mutant):
    def write(self, peer, grant, ops, notify=None, on_done=None):
        return self.real(peer, grant, ops, on_done)


class LeaksDescriptors(Mutant):
    leaked: ClassVar[list[int]] = []

    def close(self):
        super().close()
        self.leaked.append(os.open("/dev/null", os.O_RDONLY))


class LeaksThreads(Mutant):
    end = threading.Event()

    def close(self):
        super().close()
        threading.Thread(target=self.end.wait, daemon=True).start()


class Spins(Mutant):
    spinning = True

    def open(self):
        def spin():
            while self.spinning:
                pass

        threading.Thread(target=spin, daemon=True).start()
        return super().open()

    def close(self):
        self.spinning = False
        super().close()


class OutlivesClose(Mutant):
    closing = False

    def close(self):
        if self.closing:
            super().close()
        self.closing = True


def spec(factory):
    """The mutant as a plugin that calls itself shm."""
    return TransportSpec(name="shm", summary="broken", config=ShmConfig, factory=factory)


@hookimpl
def pdhub_register_transports():
    return [
        TransportSpec(name=name, summary="broken", config=ShmConfig, factory=factory)
        for name, factory in (("named", NamedSegments), ("dies", DiesAtExit))
    ]
