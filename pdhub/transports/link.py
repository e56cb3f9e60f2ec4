"""The way to one target process: one thread that serves writes in order, and the grants that are open there.

What a transport adds is how bytes move and how messages look; when a write may start and what happens to the writes and
grants of a peer that leaves is the same for all, and stands here.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pdhub.api import Grant, Peer, TransferFailed, TransferState, WriteOp
from pdhub.transports.grants import OpenGrants
from pdhub.transports.posting import Aborted, Posting


class TargetGone(Exception):
    """The connection to the target ended."""


class HasBytes(Protocol):
    """What a target opened."""

    @property
    def nbytes(self) -> int: ...


O = TypeVar("O", bound=HasBytes)  # noqa: E741


@dataclass(slots=True)
class Job:
    """One write."""

    peer: LinkPeer
    posting: Posting
    grant: Grant
    ops: Sequence[WriteOp]


class LinkPeer(Peer):
    """A target, as one user of its link sees it."""

    def __init__(self, link: Link[Any]) -> None:
        self._link = link
        self.closed = False

    def prepare(self, grant: Grant) -> None:
        if len(grant.data) == self._link.token_bytes:
            self.post(Posting(None), grant, ())

    def post(self, posting: Posting, grant: Grant, ops: Sequence[WriteOp]) -> None:
        """Queue a write; it fails at once if the target is gone or the peer was closed."""
        self._link.post(Job(self, posting, grant, ops))

    def close(self) -> None:
        self.closed = True
        self._link.leave(self)


class Link(ABC, Generic[O]):
    """It outlives its peers, so that what is known of the target's memory stays from one hand-over to the next.

    The thread starts with the constructor, so whatever a subclass has of its own must be there before.

    Args:
        sock: connected to the target; the link's from now on.
        grants: open there. timeout_s: longest wait for the target to answer an open.
        name: of the thread.
    """

    token_bytes: int
    """Of a grant."""

    def __init__(self, sock: socket.socket, grants: OpenGrants[O], timeout_s: float, name: str) -> None:
        self._sock = sock
        self._sock.setblocking(False)
        self._grants = grants
        self._timeout_s = timeout_s
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._leaving: deque[tuple[LinkPeer, threading.Event]] = deque()
        self._current: Job | None = None
        self._over = ""
        self._ended = False
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """The target is gone, or it was closed: of no use for another peer."""
        return bool(self._over)

    def post(self, job: Job) -> None:
        """Queue a write, or fail it."""
        job.posting.interrupt = self._poke
        with self._lock:
            over = self._over or ("the peer was closed" if job.peer.closed else "")
            if not over:
                self._jobs.append(job)
        if over:
            job.posting.finish(TransferState.FAILED, TransferFailed(over))
        else:
            self._poke()

    def leave(self, peer: LinkPeer) -> None:
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
        self._give_up("the transport was closed")
        self._poke()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- what a transport adds, all on the link's thread -----------------------------------------------------------

    @abstractmethod
    def _write(self, job: Job) -> None:
        """One write from begin to end. Raises TargetGone, after the posting has its end."""

    @abstractmethod
    def _ask(self, token: bytes) -> None:
        """Ask the target to open a grant. Raises TargetGone."""

    @abstractmethod
    def _return(self, token: bytes) -> None:
        """Tell the target that no write of the grant runs, and none will start. Raises TargetGone."""

    @abstractmethod
    def _take_in(self) -> None:
        """Every message that waits. Raises TargetGone."""

    def _give_back(self, token: bytes) -> None:
        """Return a closed grant, once no write of it runs."""
        self._return(token)

    def _drop_target(self) -> None:
        """The thread ends: nothing is known of the target's memory any more."""

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._over:
                self._receive(None)
                while self._jobs and not self._over:
                    self._current = self._jobs.popleft()
                    self._write(self._current)
                    self._current = None
                    self._let_go()
            for token in self._grants.clear():
                self._return(token)
        except TargetGone:
            self._give_up("the target went away")
        finally:
            self._end()

    def _end(self) -> None:
        self._drop_target()
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

    def _open(self, job: Job) -> O:
        """What the job's grant opens. Raises TransferFailed, Aborted, TargetGone."""
        token = job.grant.data
        opened = self._grants.get(token)
        if opened is None:
            self._grants.expect(token)
            self._ask(token)
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
        """Between two pieces: raises what ends the write."""
        self._receive(0)
        self._stop_if_asked(job)
        if self._grants.get(job.grant.data) is None:
            raise TransferFailed("the target took the grant back")

    def _stop_if_asked(self, job: Job) -> None:
        if job.posting.aborting:
            raise Aborted
        if job.peer.closed or self._over:
            raise TransferFailed(self._over or "the peer was closed")

    def _receive(self, timeout_s: float | None) -> None:
        """Sleep until there is something to do, then take in every message that waits."""
        for fd, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1000):
            if fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                self._let_go()
            else:
                self._take_in()

    def _give_up(self, why: str) -> None:
        """No more writes; the first reason stays."""
        with self._lock:
            self._over = self._over or why

    def _poke(self) -> None:
        with self._lock:
            if not self._ended:
                os.eventfd_write(self._wake, 1)


K = TypeVar("K", bound=Hashable)
L = TypeVar("L", bound=Link[Any])


class Links(Generic[K, L]):
    """One link a target. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: dict[K, L] = {}

    def get(self, target: K, make: Callable[[], L]) -> L:
        """The link there is, or a new one in place of one that is over."""
        with self._lock:
            link = self._links.get(target)
            if link is None or link.over:
                self._links = {known: link for known, link in self._links.items() if not link.over}
                link = self._links[target] = make()
            return link

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            links, self._links = self._links, {}
        for link in links.values():
            link.close()
