"""The writer's end of shm: copies into granted memory and answers the target's recalls."""

from __future__ import annotations

import ctypes
import os
import socket

from pdhub.api import TransferFailed, TransferState
from pdhub.transports.link import Job, Link, LinkPeer, TargetGone
from pdhub.transports.posting import Aborted
from pdhub.transports.shm_access import Access, Opened
from pdhub.transports.shm_wire import PACKET_BYTES, TOKEN_BYTES, Kind, pack, unpack

PIECE = 4 << 20
"""Bytes copied between two looks at the target's messages: well under a millisecond."""

COPY_COST = 16 << 10
"""What a copy of few bytes counts against :data:`PIECE`, so that many small ones are not looked at one by one."""


class ShmPeer(LinkPeer):
    """A target over shm."""


class ShmLink(Link[Opened]):
    """Memory that is mapped once stays mapped from one hand-over to the next: mapping anew costs as much as copying.

    Args:
        address: of the target's socket.
        timeout_s: longest wait for the target to answer an open.
    """

    token_bytes = TOKEN_BYTES
    _grants: Access

    def __init__(self, address: str, timeout_s: float) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(timeout_s)
            sock.connect(address)
        except OSError as error:
            sock.close()
            raise TransferFailed(f"the target cannot be reached over shm: {error.strerror or error}") from error
        super().__init__(sock, Access(), timeout_s, "pdhub shm writer")

    def _drop_target(self) -> None:
        self._grants.clear()

    def _write(self, job: Job) -> None:
        posting = job.posting
        if not posting.begin():
            return
        try:
            target = self._open(job)
            budget = 0
            for op in job.ops:
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

    def _ask(self, token: bytes) -> None:
        self._send(Kind.OPEN, token)

    def _return(self, token: bytes) -> None:
        self._send(Kind.RETURNED, token)

    def _take_in(self) -> None:
        while self._take_one():
            pass

    def _send(self, kind: Kind, token: bytes) -> None:
        try:
            self._sock.send(pack(kind, token))
        except OSError as error:
            raise TargetGone from error

    def _take_one(self) -> bool:
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
                if not self._grants.open(token, segment, mapped, nbytes, fds[0] if fds else None):
                    self._grants.refuse(token)
                    self._return(token)
            elif kind is Kind.REFUSED:
                self._grants.refuse(token)
            elif kind is Kind.REVOKED:
                self._grants.close(token)
            elif kind is Kind.RECALL:
                self._grants.close(token)
                self._return(token)
            elif kind is Kind.FORGET:
                self._grants.forget(segment)
            else:
                raise ValueError(f"unexpected {kind!r}")
        except ValueError as error:
            raise TargetGone from error
        finally:
            for fd in fds:
                os.close(fd)
        return True
