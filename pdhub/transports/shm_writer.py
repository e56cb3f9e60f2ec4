"""The writer's end of shm: one thread a target that copies into granted memory and answers the target's recalls."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pdhub.api import Grant, Peer, TransferFailed, TransferState, WriteOp
from pdhub.transports.posting import Aborted, Posting
from pdhub.transports.shm_access import Access, Opened
from pdhub.transports.shm_wire import PACKET_BYTES, Kind, pack, unpack

PIECE = 4 << 20
"""Bytes copied between two looks at the target's messages: well under a millisecond."""

COPY_COST = 16 << 10
"""What a copy of few bytes counts against :data:`PIECE`, so that many small ones are not looked at one by one."""


class TargetGone(Exception):
    """The connection to the target ended."""


@dataclass(slots=True)
class Job:
    peer: ShmPeer
    posting: Posting
    grant: Grant
    ops: Sequence[WriteOp]


class ShmPeer(Peer):
    """A target, as one user of its link sees it."""

    def __init__(self, link: ShmLink) -> None:
        self._link = link
        self.closed = False

    def post(self, posting: Posting, grant: Grant, ops: Sequence[WriteOp]) -> None:
        """Queue a write; it fails at once if the target is gone or the peer was closed."""
        self._link.post(Job(self, posting, grant, ops))

    def close(self) -> None:
        self.closed = True
        self._link.leave(self)


class ShmLink:
    """The connection to one target process, and one thread that copies. It outlives its peers, so that memory that is
    mapped once stays mapped from one hand-over to the next: mapping anew costs as much as copying.

    Args:
        address: of the target's socket.
        timeout_s: longest wait for the target to answer an open.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._sock.settimeout(timeout_s)
            self._sock.connect(address)
        except OSError as error:
            self._sock.close()
            raise TransferFailed(f"the target cannot be reached over shm: {error.strerror or error}") from error
        self._sock.setblocking(False)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._leaving: deque[tuple[ShmPeer, threading.Event]] = deque()
        self._current: ShmPeer | None = None
        self._over = ""
        self._ended = False
        self._access = Access()
        self._refused: set[bytes] = set()
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="pdhub shm writer", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """The target is gone, or it was closed: of no use for another peer."""
        return bool(self._over)

    def post(self, job: Job) -> None:
        job.posting.interrupt = self._poke
        with self._lock:
            over = self._over or ("the peer was closed" if job.peer.closed else "")
            if not over:
                self._jobs.append(job)
        if over:
            job.posting.finish(TransferState.FAILED, TransferFailed(over))
        else:
            self._poke()

    def leave(self, peer: ShmPeer) -> None:
        """Fail what a closed peer has posted and return its grants. Returns when that is done."""
        left = threading.Event()
        with self._lock:
            if self._ended:
                return
            self._leaving.append((peer, left))
        self._poke()
        if threading.current_thread() is not self._thread:
            left.wait()

    def close(self) -> None:
        """End the thread; every grant is returned. Idempotent."""
        with self._lock:
            self._over = self._over or "the transport was closed"
        self._poke()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _poke(self) -> None:
        with self._lock:
            if not self._ended:
                os.eventfd_write(self._wake, 1)

    # -- the worker -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._over:
                self._receive(None)
                while self._jobs and not self._over:
                    job = self._jobs.popleft()
                    self._current = job.peer
                    self._copy(job)
                    self._current = None
                    self._let_go()
            for token in self._access.clear():
                self._send(Kind.RETURNED, token)
        except TargetGone:
            with self._lock:
                self._over = self._over or "the target went away"
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._over = self._over or "the writer's thread ended"
            self._ended = True
            jobs, self._jobs = self._jobs, deque()
            leaving, self._leaving = self._leaving, deque()
            os.close(self._wake)
            self._sock.close()
        for job in jobs:
            job.posting.finish(TransferState.FAILED, TransferFailed(self._over))
        self._access.clear()
        for _, left in leaving:
            left.set()

    def _let_go(self) -> None:
        """Peers that were closed: their jobs fail, their grants go back. Not the one whose copy runs: it is told to
        stop, and comes when it has."""
        while self._leaving and self._leaving[0][0] is not self._current:
            with self._lock:
                peer, left = self._leaving.popleft()
                mine = [job for job in self._jobs if job.peer is peer]
                self._jobs = deque(job for job in self._jobs if job.peer is not peer)
            try:
                for job in mine:
                    job.posting.finish(TransferState.FAILED, TransferFailed("the peer was closed"))
                for token in self._access.leave(peer):
                    self._send(Kind.RETURNED, token)
            finally:
                left.set()

    def _copy(self, job: Job) -> None:
        posting = job.posting
        if not posting.begin():
            return
        try:
            target = self._open(job)
            budget = 0
            for op in job.ops:
                if op.remote_offset + op.nbytes > target.nbytes:
                    raise TransferFailed("the grant says more bytes than the region behind it has")
                for start in range(0, op.nbytes, PIECE):
                    if budget <= 0:
                        self._check(job)
                        budget = PIECE
                    size = min(PIECE, op.nbytes - start)
                    ctypes.memmove(
                        target.address + op.remote_offset + start, op.local.address + op.local_offset + start, size
                    )
                    budget -= size + COPY_COST
            # A fence tells its writers before it returns. If it came while bytes were copied, it is seen here: they
            # went where nobody reads, and "done" would be a lie.
            self._check(job)
        except Aborted:
            posting.finish(TransferState.ABORTED)
        except TransferFailed as error:
            posting.finish(TransferState.FAILED, error)
        except TargetGone:
            posting.finish(TransferState.FAILED, TransferFailed("the target went away"))
            raise
        else:
            posting.finish(TransferState.DONE)

    def _open(self, job: Job) -> Opened:
        token = job.grant.data
        opened = self._access.get(token)
        if opened is None:
            self._refused.clear()
            self._send(Kind.OPEN, token)
            deadline = time.monotonic() + self._timeout_s
        while opened is None:
            if token in self._refused:
                raise TransferFailed("the target does not know this grant")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferFailed(f"the target did not open the landing within {self._timeout_s} s")
            self._stop_if_asked(job)
            self._receive(left)
            opened = self._access.get(token)
        self._access.use(token, job.peer)
        return opened

    def _check(self, job: Job) -> None:
        self._receive(0)
        self._stop_if_asked(job)
        if self._access.get(job.grant.data) is None:
            raise TransferFailed("the target took the grant back")

    def _stop_if_asked(self, job: Job) -> None:
        if job.posting.aborting:
            raise Aborted
        if job.peer.closed or self._over:
            raise TransferFailed(self._over or "the peer was closed")

    # -- messages -------------------------------------------------------------------------------------------------

    def _send(self, kind: Kind, token: bytes) -> None:
        try:
            self._sock.send(pack(kind, token))
        except OSError as error:
            raise TargetGone from error

    def _receive(self, timeout_s: float | None) -> None:
        """Sleep until there is something to do, then take in every message that waits."""
        ready = self._poll.poll(None if timeout_s is None else timeout_s * 1000)
        for fd, _ in ready:
            if fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                self._let_go()
            else:
                while self._take_in():
                    pass

    def _take_in(self) -> bool:
        """One message; False if none waits. Between copies by construction, so a grant can be returned at once."""
        try:
            packet, fds, _, _ = socket.recv_fds(self._sock, PACKET_BYTES + 1, 1)
        except BlockingIOError:
            return False
        except OSError as error:
            raise TargetGone from error
        if not packet:
            raise TargetGone
        try:
            kind, token, segment, mapped, nbytes = unpack(packet)
            if kind is Kind.OPENED:
                if not self._access.open(token, segment, mapped, nbytes, fds[0] if fds else None):
                    self._refused.add(token)
                    self._send(Kind.RETURNED, token)
            elif kind is Kind.REFUSED:
                self._refused.add(token)
            elif kind is Kind.REVOKED:
                self._access.close(token)
            elif kind is Kind.RECALL:
                self._access.close(token)
                self._send(Kind.RETURNED, token)
            elif kind is Kind.FORGET:
                self._access.forget(segment)
            else:
                raise ValueError(f"unexpected {kind!r}")
        except ValueError as error:
            raise TargetGone from error
        finally:
            for fd in fds:
                os.close(fd)
        return True
