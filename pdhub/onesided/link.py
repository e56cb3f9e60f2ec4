"""The writer's end: one thread a target process that posts pieces to the library and answers the target's messages."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdhub.api import Grant, Peer, TransferFailed, TransferState, WriteOp
from pdhub.onesided.grants import Grants, Opened
from pdhub.onesided.native import Piece, Route, Sending, StillUnderWay
from pdhub.onesided.pieces import batches
from pdhub.onesided.wire import Address, Inbox, Kind, Message
from pdhub.transports.posting import Aborted, Posting

SPIN_S = 200e-6
"""A piece that is on its way is asked for without a pause for so long, then with one of :data:`PAUSE_S`."""

PAUSE_S = 50e-6
GIVE_UP_S = 5.0
"""How long pieces of a write that nobody wants any more may take to end before the route is dropped."""


class TargetGone(Exception):
    """The control connection ended."""


@dataclass(slots=True)
class Job:
    peer: OneSidedPeer
    posting: Posting
    grant: Grant
    ops: Sequence[WriteOp]


class OneSidedPeer(Peer):
    """A target, as one user of its link sees it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.closed = False

    def post(self, posting: Posting, grant: Grant, ops: Sequence[WriteOp]) -> None:
        """Queue a write; it fails at once if the target is gone or the peer was closed."""
        self._link.post(Job(self, posting, grant, ops))

    def close(self) -> None:
        self.closed = True
        self._link.leave(self)


class Link:
    """The way to one target process. It outlives its peers, so that what the library knows of the target stays.

    Args:
        name: of the transport, for messages.
        address: the target.
        connect: makes the library's route; called once the target has answered.
        timeout_s: longest wait for an answer on the control connection.
        piece_bytes, pieces_in_flight: how a write is cut.
    """

    def __init__(
        self,
        name: str,
        address: Address,
        connect: Callable[[bytes], Route],
        timeout_s: float,
        piece_bytes: int,
        pieces_in_flight: int,
    ) -> None:
        self._timeout_s = timeout_s
        self._piece_bytes = piece_bytes
        self._depth = pieces_in_flight
        self._inbox = Inbox()
        self._sock = self._dial(name, address)
        try:
            self._route = connect(address.native)
        except BaseException:
            self._sock.close()
            raise
        self._sock.setblocking(False)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._leaving: deque[tuple[OneSidedPeer, threading.Event]] = deque()
        self._current: Job | None = None
        self._over = ""
        self._ended = False
        self._grants = Grants()
        self._owed: set[bytes] = set()
        self._lost: set[bytes] = set()
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name=f"pdhub {name} writer", daemon=True)
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

    def leave(self, peer: OneSidedPeer) -> None:
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

    def _dial(self, name: str, address: Address) -> socket.socket:
        where = f"{address.host}:{address.port}"
        sock: socket.socket | None = None
        try:
            sock = socket.create_connection((address.host, address.port), self._timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.sendall(Message(Kind.HELLO, address.instance).pack())
            welcome = list(self._inbox.take(sock.recv(1 << 16)))
            if [message.kind for message in welcome] != [Kind.WELCOME]:
                raise ConnectionError("another process or instance is there")
        except (OSError, ValueError) as error:
            if sock is not None:
                sock.close()
            raise TransferFailed(f"the target at {where} cannot be reached over {name}: {error}") from error
        return sock

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
                    self._current = self._jobs.popleft()
                    self._write(self._current)
                    self._settle_grant(self._current)
                    self._current = None
                    self._pay()
                    self._let_go()
            for token in self._grants.clear():
                self._return(token)
        except TargetGone:
            with self._lock:
                self._over = self._over or "the target went away"
        finally:
            self._end()

    def _end(self) -> None:
        self._route.close()
        with self._lock:
            self._over = self._over or "the writer's thread ended"
            self._ended = True
            jobs, self._jobs = self._jobs, deque()
            leaving, self._leaving = self._leaving, deque()
            os.close(self._wake)
            self._sock.close()
        for job in jobs:
            job.posting.finish(TransferState.FAILED, TransferFailed(self._over))
        for _, left in leaving:
            left.set()

    def _let_go(self) -> None:
        """Peers that were closed: their jobs fail, their grants go back. Not the one whose write runs: it is told to
        stop, and comes when it has."""
        while self._leaving and (self._current is None or self._leaving[0][0] is not self._current.peer):
            with self._lock:
                peer, left = self._leaving.popleft()
                mine = [job for job in self._jobs if job.peer is peer]
                self._jobs = deque(job for job in self._jobs if job.peer is not peer)
            try:
                for job in mine:
                    job.posting.finish(TransferState.FAILED, TransferFailed("the peer was closed"))
                for token in self._grants.leave(peer):
                    self._give_back(token)
            finally:
                left.set()

    def _write(self, job: Job) -> None:
        """One write from begin to end. When this returns the library reads nothing of its source any more."""
        posting = job.posting
        if not posting.begin():
            return
        flight: deque[Sending] = deque()
        try:
            target = self._open(job)
            for batch in batches(job.ops, target.address, target.device, self._piece_bytes):
                while len(flight) >= self._depth:
                    self._reap(flight, job)
                self._check(job)
                flight.append(self._post(batch, job))
            while flight:
                self._reap(flight, job)
            # A fence tells its writers before it detaches the memory. If it came while the last bytes were on their
            # way, it is seen here: they went where nobody reads, and "done" would be a lie.
            self._check(job)
        except Aborted:
            posting.finish(TransferState.ABORTED, stopped=self._settled(flight, job))
        except StillUnderWay as error:
            self._drop_route(job)
            posting.finish(TransferState.FAILED, error, stopped=False)
        except TransferFailed as error:
            posting.finish(TransferState.FAILED, error, stopped=self._settled(flight, job))
        except TargetGone:
            self._settled(flight, job)
            posting.finish(TransferState.FAILED, TransferFailed("the target went away"), stopped=False)
            raise
        else:
            posting.finish(TransferState.DONE)

    def _post(self, batch: list[Piece], job: Job) -> Sending:
        try:
            return self._route.post(batch)
        except TransferFailed:
            self._lost.add(job.grant.data)
            raise

    def _reap(self, flight: deque[Sending], job: Job) -> None:
        """Wait for the oldest piece."""
        spin_until = time.monotonic() + SPIN_S
        while True:
            sending = flight[0]
            try:
                done = sending.poll()
            except TransferFailed:
                flight.popleft()
                self._lost.add(job.grant.data)
                raise
            if done:
                if flight.popleft().unproven:
                    self._lost.add(job.grant.data)
                return
            self._check(job)
            if time.monotonic() > spin_until:
                time.sleep(PAUSE_S)

    def _settled(self, flight: deque[Sending], job: Job) -> bool:
        """Pieces under way cannot be called back: wait for their end. True if nothing of it can land any more."""
        deadline = time.monotonic() + GIVE_UP_S
        for sending in flight:
            sending.stop()
        while flight:
            try:
                ended = flight[0].poll()
            except StillUnderWay:
                self._drop_route(job)
                return False
            except TransferFailed:  # the write has failed already, or nobody wants it
                self._lost.add(job.grant.data)
                ended = True
            if ended:
                if flight.popleft().unproven:
                    self._lost.add(job.grant.data)
            elif time.monotonic() > deadline:
                self._drop_route(job)
                return False
            else:
                time.sleep(PAUSE_S)
        return job.grant.data not in self._lost

    def _drop_route(self, job: Job) -> None:
        """Give the target up."""
        self._lost.add(job.grant.data)
        self._route.close()
        with self._lock:
            self._over = self._over or "the target does not take what was sent"

    def _open(self, job: Job) -> Opened:
        token = job.grant.data
        opened = self._grants.get(token)
        if opened is None:
            self._grants.expect(token)
            self._send(Kind.OPEN, token)
            deadline = time.monotonic() + self._timeout_s
        while opened is None:
            if self._grants.was_refused(token):
                raise TransferFailed("the target does not know this grant")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferFailed(f"the target did not open the landing within {self._timeout_s} s")
            self._stop_if_asked(job)
            self._receive(left)
            opened = self._grants.get(token)
        self._grants.use(token, job.peer)
        for op in job.ops:
            if op.remote_offset + op.nbytes > opened.nbytes:
                raise TransferFailed("the grant says more bytes than the region behind it has")
        return opened

    def _check(self, job: Job) -> None:
        self._receive(0)
        self._stop_if_asked(job)
        if self._grants.get(job.grant.data) is None:
            raise TransferFailed("the target took the grant back")

    def _stop_if_asked(self, job: Job) -> None:
        if job.posting.aborting:
            raise Aborted
        if job.peer.closed or self._over:
            raise TransferFailed(self._over or "the peer was closed")

    # -- messages -------------------------------------------------------------------------------------------------

    def _give_back(self, token: bytes) -> None:
        """Tell the target that no write of the grant runs; later, if one does."""
        if self._current is not None and self._current.grant.data == token:
            self._owed.add(token)
        else:
            self._return(token)

    def _settle_grant(self, job: Job) -> None:
        """What the library has broken off may still arrive: the target must know before it uses the memory again."""
        token = job.grant.data
        if token in self._lost:
            self._grants.close(token)
            self._owed.add(token)

    def _pay(self) -> None:
        while self._owed:
            self._return(self._owed.pop())

    def _return(self, token: bytes) -> None:
        self._send(Kind.LOST if token in self._lost else Kind.RETURNED, token)
        self._lost.discard(token)

    def _send(self, kind: Kind, token: bytes) -> None:
        data = Message(kind, token).pack()
        try:
            if self._sock.send(data) != len(data):
                raise TargetGone
        except OSError as error:
            raise TargetGone from error

    def _receive(self, timeout_s: float | None) -> None:
        """Sleep until there is something to do, then take in every message that waits."""
        for fd, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1000):
            if fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                self._let_go()
                continue
            try:
                data = self._sock.recv(1 << 16)
                if not data:
                    raise TargetGone
                for message in self._inbox.take(data):
                    self._handle(message)
            except (OSError, ValueError) as error:
                raise TargetGone from error

    def _handle(self, message: Message) -> None:
        token = message.token
        if message.kind is Kind.OPENED:
            device, _, description = message.extra.partition(b"\0")
            try:
                if description:
                    self._route.learn(description)
                self._grants.open(token, Opened(message.address, message.nbytes, device.decode()))
            except TransferFailed:
                self._grants.refuse(token)
                self._return(token)
        elif message.kind is Kind.REFUSED:
            self._grants.refuse(token)
        elif message.kind in (Kind.REVOKED, Kind.RECALL):
            self._grants.close(token)
            self._give_back(token)
        else:
            raise ValueError(f"unexpected {message.kind!r}")
