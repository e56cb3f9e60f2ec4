"""The writer's end: posts pieces to the library and answers the target's messages."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdhub.api import TransferFailed, TransferState
from pdhub.onesided.native import Piece, Route, Sending, StillUnderWay
from pdhub.onesided.pieces import batches
from pdhub.onesided.wire import TOKEN_BYTES, Address, Inbox, Kind, Message
from pdhub.transports.grants import OpenGrants
from pdhub.transports.link import Job, Link, LinkPeer, TargetGone
from pdhub.transports.posting import Aborted

SPIN_S = 200e-6
"""A piece that is on its way is asked for without a pause for so long, then with one of :data:`PAUSE_S`."""

PAUSE_S = 50e-6
GIVE_UP_S = 5.0
"""How long pieces of a write that nobody wants any more may take to end before the route is dropped."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A region that may be written now: where it is in the target's process."""

    address: int
    nbytes: int
    device: str


class OneSidedPeer(LinkPeer):
    """A target over a one-sided library."""


class OneSidedLink(Link[Opened]):
    """See :class:`pdhub.transports.link.Link`.

    Args:
        name: of the transport, for messages.
        address: the target.
        connect: makes the library's route; called once the target has answered.
        timeout_s: longest wait for an answer on the control connection.
        piece_bytes, pieces_in_flight: how a write is cut.
    """

    token_bytes = TOKEN_BYTES

    def __init__(
        self,
        name: str,
        address: Address,
        connect: Callable[[bytes], Route],
        timeout_s: float,
        piece_bytes: int,
        pieces_in_flight: int,
    ) -> None:
        self._piece_bytes = piece_bytes
        self._depth = pieces_in_flight
        self._inbox = Inbox()
        self._owed: set[bytes] = set()
        self._lost: set[bytes] = set()
        sock = self._dial(name, address, timeout_s)
        try:
            self._route = connect(address.native)
        except BaseException:
            sock.close()
            raise
        super().__init__(sock, OpenGrants(), timeout_s, f"pdhub {name} writer")

    def _dial(self, name: str, address: Address, timeout_s: float) -> socket.socket:
        where = f"{address.host}:{address.port}"
        sock: socket.socket | None = None
        try:
            sock = socket.create_connection((address.host, address.port), timeout_s)
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

    def _drop_target(self) -> None:
        self._route.close()

    def _write(self, job: Job) -> None:
        """When this returns the library reads nothing of the job's source any more."""
        self._move(job)
        self._settle_grant(job)
        while self._owed:
            self._return(self._owed.pop())

    def _move(self, job: Job) -> None:
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
        self._give_up("the target does not take what was sent")

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

    def _ask(self, token: bytes) -> None:
        self._send(Kind.OPEN, token)

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

    def _take_in(self) -> None:
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
                self._grants.opened(token, Opened(message.address, message.nbytes, device.decode()))
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
