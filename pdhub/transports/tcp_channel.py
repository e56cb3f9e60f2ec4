"""The writes of one grant over tcp: one connection and one thread."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from pdhub.api import Grant, TransferFailed, TransferState, WriteOp
from pdhub.transports.posting import Aborted, Posting
from pdhub.transports.tcp_dial import Address
from pdhub.transports.tcp_socket import StreamEnded, limit, receive, send, shut
from pdhub.transports.tcp_wire import ACK, FRAME, Kind, Purpose

BATCH_BYTES = 16 << 20
"""Bytes sent between two looks at whether somebody aborts."""

BATCH_PARTS = 512
"""Most buffers that one system call is given; the kernel's limit is 1024."""

PROOF_S = 1.0
"""How long a writer waits for the target's end of stream when it has to prove that it stopped."""


class Channel:
    """Writes of one grant, in order. Its thread ends when the target closes the connection, or the peer is closed."""

    def __init__(self, address: Address, grant: Grant, gone: Callable[[Channel], None]) -> None:
        self.grant = grant
        self._address = address
        self._gone = gone
        self._lock = threading.Lock()
        self._jobs: deque[tuple[Posting, Sequence[WriteOp]]] = deque()
        self._sock: socket.socket | None = None
        self._current: Posting | None = None
        self._number = 0
        self._closing = False
        self._ended = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="pdhub tcp writer", daemon=True)
        self._thread.start()

    def post(self, posting: Posting, ops: Sequence[WriteOp]) -> bool:
        """Queue a write. False: the channel has ended, make another."""
        with self._lock:
            if self._ended or self._closing:
                return False
            posting.interrupt = partial(self._interrupt, posting)
            self._jobs.append((posting, ops))
            os.eventfd_write(self._wake, 1)
            return True

    def close(self) -> None:
        """What is queued or running fails. Returns when the thread has ended."""
        with self._lock:
            self._closing = True
            if not self._ended:
                os.eventfd_write(self._wake, 1)
            if self._sock is not None:
                shut(self._sock, socket.SHUT_WR)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _interrupt(self, posting: Posting) -> None:
        """Wake the thread out of a blocking send. The target reads what was sent up to here, then closes."""
        with self._lock:
            if self._sock is not None and self._current is posting:
                shut(self._sock, socket.SHUT_WR)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                posting, ops = self._jobs.popleft()
                if posting.begin():
                    self._send(posting, ops)
        finally:
            with self._lock:
                self._ended = True
                jobs, self._jobs = self._jobs, deque()
                os.close(self._wake)
            self._drop()
            for posting, _ in jobs:
                posting.finish(TransferState.FAILED, TransferFailed("the peer was closed"))
            self._gone(self)

    def _wait(self) -> bool:
        """Sleep until there is a job. False: nothing to do any more."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self._sock is not None:
            poll.register(self._sock, select.POLLIN)
        while True:
            with self._lock:
                if self._closing:
                    return False
                if self._jobs:
                    return True
            for fd, _ in poll.poll():
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                    continue
                self._drop()  # between writes the target says nothing but goodbye
                with self._lock:
                    if not self._jobs:
                        self._ended = True
                        return False
                return True

    def _drop(self) -> None:
        with self._lock:
            sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def _send(self, posting: Posting, ops: Sequence[WriteOp]) -> None:
        error: Exception | None = None
        stopped = True
        with self._lock:
            self._current = posting
        try:
            self._connect()
            self._transmit(posting, ops)
        except (StreamEnded, TransferFailed, Aborted) as caught:
            error = caught
            stopped = self._prove_stopped()
        with self._lock:
            self._current = None
        if error is None:
            posting.finish(TransferState.DONE)
        elif posting.aborting and stopped:
            posting.finish(TransferState.ABORTED)
        else:
            failure = error if isinstance(error, TransferFailed) else TransferFailed(f"tcp: {error or 'stopped'}")
            posting.finish(TransferState.FAILED, failure, stopped=stopped)

    def _connect(self) -> None:
        if self._sock is None:
            sock, nbytes = self._address.dial(Purpose.WRITE, self.grant.data)
            if nbytes < self.grant.nbytes:
                sock.close()
                raise TransferFailed("the grant says more bytes than the region behind it has")
            with self._lock:
                self._sock = sock

    def _transmit(self, posting: Posting, ops: Sequence[WriteOp]) -> None:
        sock = self._sock
        assert sock is not None
        self._number += 1
        for batch in _batches(ops, FRAME.pack(Kind.END, self._number, 0)):
            if posting.aborting or self._closing:
                raise Aborted
            send(sock, *batch)
        (number,) = ACK.unpack(receive(sock, ACK.size))
        if number != self._number:
            raise StreamEnded(f"the target answered {number} instead of {self._number}")

    def _prove_stopped(self) -> bool:
        """End our stream and wait for the end of the target's: it closes only after its last read."""
        sock = self._sock
        if sock is None:
            return True
        shut(sock, socket.SHUT_WR)
        try:
            limit(sock, socket.SO_RCVTIMEO, PROOF_S)
            while sock.recv(4096):
                pass
            return True
        except ConnectionResetError:
            return True
        except OSError:
            return False
        finally:
            self._drop()


def _batches(ops: Sequence[WriteOp], end: bytes) -> Iterator[list[bytes | memoryview]]:
    """What one system call sends each: headers and pieces of sources, at last ``end``."""
    parts: list[bytes | memoryview] = []
    size = 0
    for op in ops:
        assert op.local.view is not None
        for start in range(0, op.nbytes, BATCH_BYTES):
            count = min(BATCH_BYTES, op.nbytes - start)
            at = op.local_offset + start
            parts += (FRAME.pack(Kind.DATA, op.remote_offset + start, count), op.local.view[at : at + count])
            size += count
            if size >= BATCH_BYTES or len(parts) >= BATCH_PARTS:
                yield parts
                parts, size = [], 0
    yield [*parts, end]
