"""A sender process: one transport, one layout, staging shared by all hand-overs, one control channel a node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from pdhub import __version__
from pdhub.api.errors import LayoutMismatch, TransferFailed
from pdhub.api.layout import KVLayout
from pdhub.api.transport import Transport
from pdhub.core.handoff import largest_chunk_bytes
from pdhub.sender.channel import Channel, hello
from pdhub.sender.session import Context, OnEnd, Session
from pdhub.sender.staging import Memory, Staging, slot_count
from pdhub.wire.control import Join
from pdhub.wire.http import HandoffParams


@dataclass(frozen=True, slots=True)
class SenderStats:
    """Momentary counts."""

    sessions: int
    channels: int
    slots: int
    slots_free: int


class Sender:
    """See the module's text. All methods are thread-safe.

    Args:
        transport: open; the caller closes it after the sender.
        name: of this process, for the node's log.
        layout: of the KV that is written.
        chunk_tokens: tokens of the largest chunk; it fixes the size of a staging slot.
        staging_bytes: most memory for staging. slots: most slots.
        verify: send a digest of every byte with done.
        max_ops: the transport's limit of operations a write; 0 = none.
        memory: makes staging memory, as where the KV is on a device; default: host memory.
        on_slot: called from any thread when a staging slot became free, for users of :meth:`Session.offer`.

    Raises:
        ConfigError: the staging does not hold two chunks.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        name: str,
        layout: KVLayout,
        chunk_tokens: int,
        staging_bytes: int,
        slots: int = 16,
        verify: bool = False,
        max_ops: int = 0,
        connect_timeout_s: float = 2.0,
        memory: Memory | None = None,
        on_slot: Callable[[], None] | None = None,
    ) -> None:
        slot_bytes = largest_chunk_bytes(layout, chunk_tokens)
        count = slot_count(staging_bytes, slot_bytes, slots)
        self._layout = layout
        self._hello = hello(name, __version__, transport.name, layout.fingerprint)
        self._connect_timeout_s = connect_timeout_s
        self._workers = ThreadPoolExecutor(4, thread_name_prefix="pdhub-sender")
        self._staging = Staging(transport, name, slot_bytes, count, memory=memory, on_free=on_slot)
        self._context = Context(transport, layout, self._staging, self._workers, max_ops, verify)
        self._lock = threading.Lock()
        self._channels: dict[tuple[str, int], Channel] = {}
        self._retired: list[Channel] = []
        self._sessions: set[Session] = set()
        self._closed = False

    def begin_join(
        self, params: HandoffParams, tokens: int, *, rank: int = 0, writers: int = 1, on_end: OnEnd | None = None
    ) -> Future[Session]:
        """Ask to write into a claimed landing. Does not block: the future gives the session, or raises.

        Cancelling the future gives the landing back as soon as the node answers.

        Args:
            params: from the router. tokens: exact length of the prompt.
            rank, writers: this writer's shard, and how many the landing waits for.
            on_end: see :class:`Session`.

        The future raises:
            LandingTooSmall: with the tokens that are needed. InvalidRequest: prompt and output exceed the node's
            context (code ``context_length_exceeded``). LayoutMismatch. AdmissionRejected: the node drains.
            TransferFailed: unreachable, unknown or stale transfer, or another protocol.
        """
        if params.fingerprint != self._layout.fingerprint:
            return _failed(LayoutMismatch("the landing was claimed for another KV layout than this prefill writes"))
        join = Join(params.transfer_id, params.generation, rank, writers, tokens)
        deadline = time.monotonic() + params.budget_s
        try:
            session = self._enter(params, join, deadline, on_end)
        except TransferFailed as error:
            return _failed(error)
        with self._lock:
            self._sessions = {s for s in self._sessions if not s.ended} | {session}
        return session.joined

    def join(
        self, params: HandoffParams, tokens: int, rank: int = 0, writers: int = 1, timeout_s: float = 10.0
    ) -> Session:
        """Blocking :meth:`begin_join`. Raises TransferFailed too if the node does not answer in time."""
        joined = self.begin_join(params, tokens, rank=rank, writers=writers)
        try:
            return joined.result(timeout_s)
        except TimeoutError:
            if joined.cancel():
                raise TransferFailed(f"the node did not answer the join within {timeout_s:g} s") from None
            return joined.result()

    def stats(self) -> SenderStats:
        """For metrics and tests."""
        with self._lock:
            live = sum(not s.ended for s in self._sessions)
            channels = len(self._channels)
        return SenderStats(live, channels, self._staging.slots, self._staging.free)

    def close(self) -> None:
        """Fail what is open, close every channel, end every thread. Idempotent. The transport stays open."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            sessions, channels = list(self._sessions), [*self._channels.values(), *self._retired]
        for session in sessions:
            session.fail("the sender is closing")
        for channel in channels:
            channel.close()
        self._workers.shutdown(wait=True)
        self._staging.close()

    def _enter(self, params: HandoffParams, join: Join, deadline: float, on_end: OnEnd | None) -> Session:
        key = (params.host, params.port)
        while True:
            with self._lock:
                if self._closed:
                    raise TransferFailed("the sender was closed")
                channel = self._channels.get(key)
                if channel is None:
                    channel = Channel(
                        *key, self._hello, connect_timeout_s=self._connect_timeout_s, on_closed=self._forget
                    )
                    self._channels[key] = channel
                    session = Session(self._context, channel, join, deadline, on_end)
                    channel.enter(session)  # before it can fail to dial: a fresh channel always takes it
                    channel.start()
                    return session
            session = Session(self._context, channel, join, deadline, on_end)
            if channel.enter(session):
                return session
            self._forget(channel)

    def _forget(self, channel: Channel) -> None:
        with self._lock:
            if self._channels.get((channel.host, channel.port)) is channel:
                del self._channels[channel.host, channel.port]
                # its thread is about to end; close() waits for that
                self._retired = [c for c in self._retired if c.running] + [channel]


def _failed(error: Exception) -> Future[Session]:
    future: Future[Session] = Future()
    future.set_exception(error)
    return future
