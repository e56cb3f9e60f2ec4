"""A node's control channel in a thread, and a transport whose writes end when the test says so."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pdhub.api import (
    Grant,
    KVChunk,
    KVLayout,
    OnDone,
    Peer,
    Region,
    Transfer,
    TransferFailed,
    TransferState,
    Transport,
    WriteOp,
)
from pdhub.testing.memory import MemoryPeer, MemoryTransport
from pdhub.wire.control import Accept, ControlMessage, Decoder, Hello, Join, Refused, Welcome, encode
from pdhub.wire.http import HandoffParams


def until(condition: Callable[[], Any], what: str = "condition", seconds: float = 10.0) -> None:
    """Wait for another thread. Fails loudly instead of hanging."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true in {seconds} s"
        time.sleep(0.002)


class FakeNode:
    """Accepts every join into a landing of ``capacity`` tokens, unless ``answer`` says something else."""

    def __init__(self, layout: KVLayout, capacity: int = 64, transport: Transport | None = None) -> None:
        self.layout, self.capacity = layout, capacity
        self.transport: Transport = transport or MemoryTransport()
        self.transport.open()
        self.answer: Callable[[Hello | Join], ControlMessage | None] | None = None
        self.messages: list[ControlMessage] = []
        self.landings: dict[str, Region] = {}
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._spawn(self._listen)

    def _spawn(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="fake-node")
        self._threads.append(thread)
        thread.start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self._connections.append(connection)
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        decoder = Decoder()
        while True:
            try:
                data = connection.recv(65536)
            except OSError:
                return
            if not data:
                return
            for message in decoder.feed(data):
                self.messages.append(message)
                reply = self._reply(message)
                if reply is not None:
                    connection.sendall(encode(reply))

    def _reply(self, message: ControlMessage) -> ControlMessage | None:
        if not isinstance(message, (Hello, Join)):
            return None
        if self.answer is not None:
            return self.answer(message)
        return self.default(message)

    def default(self, message: Hello | Join) -> ControlMessage:
        if isinstance(message, Hello):
            return Welcome("fake", "0", self.transport.name, self.transport.export_metadata().data)
        region = self.transport.allocate(self.layout.landing_bytes(self.capacity))
        self.landings[message.transfer_id] = region
        grant = self.transport.grant(region.id, "writer")
        return Accept(
            message.transfer_id, message.generation, self.capacity, region.id, region.nbytes, grant.data
        )  # fmt: skip

    def refuse(self, code: str, need: int = 0) -> None:
        def answer(message: Hello | Join) -> ControlMessage:
            if isinstance(message, Join):
                return Refused(message.transfer_id, code, f"refused with {code}", need)
            return self.default(message)

        self.answer = answer

    def say(self, message: ControlMessage) -> None:
        self._connections[-1].sendall(encode(message))

    def got(self, kind: type) -> list[Any]:
        return [m for m in self.messages if isinstance(m, kind)]

    @property
    def connections(self) -> int:
        return len(self._connections)

    def params(self, transfer_id: str = "t1", *, budget_s: float = 10.0) -> HandoffParams:
        return HandoffParams(transfer_id, 1, "127.0.0.1", self.port, self.layout.fingerprint, budget_s)

    def vanish(self) -> None:
        """As if the process were killed: connections reset."""
        for connection in self._connections:
            connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def close(self) -> None:
        if self._server.fileno() < 0:
            return
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
            finally:
                connection.close()
        for thread in self._threads:
            thread.join(10)
        self.transport.close()


class HeldTransfer(Transfer):
    def __init__(self, run: Callable[[], None], on_done: OnDone | None, *, can_abort: bool) -> None:
        self._run, self.on_done, self._can_abort = run, on_done, can_abort
        self._state = TransferState.POSTED
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def state(self) -> TransferState:
        return self._state

    @property
    def error(self) -> BaseException | None:
        return self._error

    def wait(self, timeout_s: float | None = None) -> TransferState:
        return self._state

    def abort(self) -> bool:
        if self._can_abort:
            self.end(TransferState.ABORTED)
        return self._state is TransferState.ABORTED

    def end(self, state: TransferState, error: BaseException | None = None) -> None:
        with self._lock:
            if self._state is not TransferState.POSTED:
                return
            if state is TransferState.DONE:
                self._run()
            self._error = error
            self._state = state
        if self.on_done is not None:
            self.on_done(self)


class HeldPeer(MemoryPeer):
    def __init__(self, target: MemoryTransport, owner: HeldTransport) -> None:
        super().__init__(target)
        self.owner = owner
        self.closed = False

    def close(self) -> None:
        self.closed = True
        for transfer in self.owner.of.pop(self, []):
            transfer.end(TransferState.FAILED, TransferFailed("peer closed"))


class HeldTransport(MemoryTransport):
    """Writes to a target in ``held`` stay posted until :meth:`let_go`; others end at once."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[MemoryTransport] = set()
        self.can_abort = True
        self.refuse_writes = False
        self.of: dict[HeldPeer, list[HeldTransfer]] = {}
        self.peers: list[HeldPeer] = []
        self.writes = itertools.count()

    def connect(self, peer: Any) -> Peer:
        made = HeldPeer(super().connect(peer).target, self)  # type: ignore[attr-defined]
        self.peers.append(made)
        return made

    def write(
        self, peer: Peer, grant: Grant, ops: Sequence[WriteOp], notify: bytes | None = None,
        on_done: OnDone | None = None,
    ) -> Transfer:  # fmt: skip
        assert isinstance(peer, HeldPeer)
        if self.refuse_writes:
            raise ValueError("no")
        next(self.writes)
        run = lambda: MemoryTransport.write(self, peer, grant, ops)  # noqa: E731
        transfer = HeldTransfer(run, on_done, can_abort=self.can_abort)  # type: ignore[arg-type]
        if peer.target in self.held:
            self.of.setdefault(peer, []).append(transfer)
        else:
            transfer.end(TransferState.DONE)
        return transfer

    def posted(self) -> list[HeldTransfer]:
        return [t for ts in list(self.of.values()) for t in ts if t.state is TransferState.POSTED]

    def let_go(self, state: TransferState = TransferState.DONE) -> None:
        for transfer in self.posted():
            transfer.end(state, TransferFailed("broken") if state is TransferState.FAILED else None)


def chunks(layout: KVLayout, tokens: int, width: int, seed: int = 7) -> list[KVChunk]:
    """Chunks whose bytes depend on their place."""
    from pdhub.core.handoff import chunk_bytes

    out = []
    for start in range(0, tokens, width):
        stop = min(tokens, start + width)
        nbytes = chunk_bytes(layout, start, stop, tokens)
        data = bytes((seed + start * 31 + i * 7) % 251 for i in range(nbytes))

        def fill(region: Region, data: bytes = data) -> None:
            assert region.view is not None
            region.view[: len(data)] = data

        out.append(KVChunk(start, stop, nbytes, fill))
    return out
