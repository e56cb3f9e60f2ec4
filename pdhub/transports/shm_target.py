"""The target's end of shm: hands descriptors to granted writers, and decides when memory may be used again.

See ``docs/adr/0002-shm-fencing.md`` for why a fence is a detachment and when reuse is safe.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
from dataclasses import dataclass, field

from pdhub.transports.memory import Memory, WarmMemory, shareable_memory
from pdhub.transports.shm_wire import PACKET_BYTES, TOKEN_BYTES, Kind, pack, unpack

log = logging.getLogger("pdhub.transports")


@dataclass(eq=False)
class Writer:
    """One connection of a writer process. ``holds``: serials of memory whose descriptor it was sent."""

    sock: socket.socket
    holds: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Segment:
    """The memory of one region during one life of it.

    ``opened``: accesses that were handed out and not returned. ``spoiled``: somebody may still write and will
    never tell, so this memory is not used again. ``freed``: the host has unregistered the region.
    """

    memory: Memory
    nbytes: int
    tokens: set[bytes] = field(default_factory=set)
    opened: set[tuple[Writer, bytes]] = field(default_factory=set)
    fenced: bool = False
    spoiled: bool = False
    freed: bool = False


class ShmTarget:
    """Segments and their writers. Served by one thread that sleeps in ``select``. Thread-safe."""

    def __init__(self, warm_bytes: int) -> None:
        self._lock = threading.RLock()
        self._warm = WarmMemory(shareable_memory, warm_bytes, self._forget)
        self._segments: dict[str, Segment] = {}
        self._tokens: dict[bytes, Segment] = {}
        self._freed: set[Segment] = set()
        self._writers: set[Writer] = set()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._address = ""

    def allocate(self, region_id: str, nbytes: int) -> Memory:
        """Memory for a region that nobody else can reach. Raises MemoryError."""
        with self._lock:
            memory = self._warm.take(nbytes)
            self._segments[region_id] = Segment(memory, nbytes)
            return memory

    def grant(self, region_id: str) -> bytes:
        """A token that opens the region. Raises ValueError if there is none, or it was fenced."""
        with self._lock:
            segment = self._segments.get(region_id)
            if segment is None or segment.fenced:
                raise ValueError(f"region {region_id!r} cannot be granted")
            token = secrets.token_bytes(TOKEN_BYTES)
            segment.tokens.add(token)
            self._tokens[token] = segment
            return token

    def fence(self, region_id: str) -> None:
        """Detach the region: no token opens it, and memory that a writer holds is never used again."""
        with self._lock:
            segment = self._segments.get(region_id)
            if segment is None:
                return
            segment.fenced = True
            self._revoke_tokens(segment)
            for writer, token in segment.opened:
                self._send(writer, pack(Kind.REVOKED, token))
            segment.spoiled = segment.spoiled or bool(segment.opened)

    def free(self, region_id: str) -> None:
        """The host needs the region no more. Idempotent."""
        with self._lock:
            segment = self._segments.pop(region_id, None)
            if segment is None:
                return
            self._revoke_tokens(segment)
            segment.freed = True
            self._freed.add(segment)
            for writer, token in segment.opened:
                self._send(writer, pack(Kind.RECALL, token))
            self._settle(segment)

    def serve(self) -> str:
        """Start listening, once; the address of the socket. An abstract one: nothing of it outlives the process."""
        with self._lock:
            if self._thread is None:
                self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._address = f"\0pdhub-shm-{secrets.token_hex(16)}"
                self._listener.bind(self._address)
                self._listener.listen(128)
                self._listener.setblocking(False)
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._thread = threading.Thread(target=self._run, name="pdhub shm target", daemon=True)
                self._thread.start()
            return self._address

    def close(self) -> None:
        """Drop every segment and connection. Idempotent."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            os.eventfd_write(self._wake, 1)
            thread.join()
            os.close(self._wake)
            self._listener.close()
        with self._lock:
            for segment in [*self._segments.values(), *self._freed]:
                segment.memory.drop()
            self._segments.clear()
            self._freed.clear()
            self._tokens.clear()
            self._warm.close()

    # -- under the lock -------------------------------------------------------------------------------------------

    def _revoke_tokens(self, segment: Segment) -> None:
        for token in segment.tokens:
            self._tokens.pop(token, None)
        segment.tokens.clear()

    def _settle(self, segment: Segment) -> None:
        """Use a freed segment's memory again, or drop it; neither while a writer may still return it."""
        if not segment.freed or segment not in self._freed or (segment.opened and not segment.spoiled):
            return
        self._freed.discard(segment)
        if segment.spoiled:
            self._forget(segment.memory)
            segment.memory.drop()
        else:
            self._warm.give(segment.memory)

    def _forget(self, memory: Memory) -> None:
        for writer in self._writers:
            if memory.serial in writer.holds:
                writer.holds.discard(memory.serial)
                self._send(writer, pack(Kind.FORGET, segment=memory.serial))

    def _send(self, writer: Writer, packet: bytes, fd: int | None = None) -> None:
        """Never blocks: a writer that reads nothing any more loses its connection, and with it all reuse."""
        try:
            socket.send_fds(writer.sock, [packet], [] if fd is None else [fd])
        except OSError:
            with contextlib.suppress(OSError):
                writer.sock.shutdown(socket.SHUT_RDWR)

    # -- the serving thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while not self._closed:
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif isinstance(key.data, Writer) and not self._receive(key.data):
                        selector.unregister(key.data.sock)
                        self._lost(key.data)
            for writer in list(self._writers):
                self._lost(writer)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            log.warning("shm: a writer could not connect: %s", error)
            return
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        if uid not in (os.geteuid(), 0):
            log.warning("shm: process %d of user %d may not connect", pid, uid)
            sock.close()
            return
        sock.setblocking(False)
        writer = Writer(sock)
        with self._lock:
            self._writers.add(writer)
        selector.register(sock, selectors.EVENT_READ, writer)

    def _receive(self, writer: Writer) -> bool:
        """One message of a writer. False: its connection is over."""
        try:
            packet = writer.sock.recv(PACKET_BYTES + 1)
            if not packet:
                return False
            kind, token, _, _, _ = unpack(packet)
        except BlockingIOError:
            return True
        except (OSError, ValueError):
            return False
        with self._lock:
            if kind is Kind.OPEN:
                self._open(writer, token)
            elif kind is Kind.RETURNED:
                self._returned(writer, token)
            else:
                return False
        return True

    def _open(self, writer: Writer, token: bytes) -> None:
        segment = self._tokens.get(token)
        if segment is None:
            self._send(writer, pack(Kind.REFUSED, token))
            return
        memory = segment.memory
        segment.opened.add((writer, token))
        first = memory.serial not in writer.holds
        writer.holds.add(memory.serial)
        opened = pack(Kind.OPENED, token, memory.serial, memory.nbytes, segment.nbytes)
        self._send(writer, opened, memory.fd if first else None)

    def _returned(self, writer: Writer, token: bytes) -> None:
        for segment in [*self._segments.values(), *self._freed]:
            if (writer, token) in segment.opened:
                segment.opened.discard((writer, token))
                self._settle(segment)

    def _lost(self, writer: Writer) -> None:
        """What it opened and did not return may be written to as long as that process lives: nobody knows."""
        writer.sock.close()
        with self._lock:
            self._writers.discard(writer)
            for segment in [*self._segments.values(), *self._freed]:
                mine = {access for access in segment.opened if access[0] is writer}
                if mine:
                    segment.opened -= mine
                    segment.spoiled = True
                    self._settle(segment)
