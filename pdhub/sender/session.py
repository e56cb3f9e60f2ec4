"""One writer of one landing: from the join to done or leave."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from enum import StrEnum

from pdhub.api.errors import EngineFailed, LeaseExpired, RequestCancelled, RequestError, TransferFailed
from pdhub.api.layout import KVLayout
from pdhub.api.prefill import KVChunk
from pdhub.api.transport import Grant, PeerMetadata, Transport, WriteOp
from pdhub.core.digest import KVDigest
from pdhub.core.handoff import chunk_blocks, chunk_bytes, plan_chunk
from pdhub.sender.channel import Channel
from pdhub.sender.pieces import Pieces
from pdhub.sender.staging import Slot, Staging
from pdhub.wire.control import Accept, Done, Join, Leave

log = logging.getLogger("pdhub.sender")

OnEnd = Callable[[RequestError], None]


@dataclass(frozen=True, slots=True)
class Context:
    """What all sessions of a sender share."""

    transport: Transport
    layout: KVLayout
    staging: Staging
    workers: Executor
    max_ops: int
    verify: bool


class _State(StrEnum):
    JOINING = "joining"
    CONNECTING = "connecting"
    OPEN = "open"
    FINISHING = "finishing"
    FINISHED = "finished"
    FAILED = "failed"


class Session:
    """Made by :meth:`pdhub.sender.Sender.begin_join`. Thread-safe; end it with :meth:`finish` or :meth:`fail`.

    Args:
        deadline: monotonic time by which the hand-over must be over.
        on_end: called once, from any thread, if it fails without :meth:`fail`: revoked, lost, or a failed write.
    """

    def __init__(self, context: Context, channel: Channel, join: Join, deadline: float, on_end: OnEnd | None) -> None:
        self.join = join
        self.deadline = deadline
        self.joined: Future[Session] = Future()
        self.capacity_tokens = 0
        self.nbytes = 0
        self.revoked = False
        self.error: RequestError | None = None
        self._context, self._channel, self._on_end = context, channel, on_end
        self._digest = KVDigest(context.layout) if context.verify else None
        self._written: Future[int] = Future()
        self._written.set_running_or_notify_cancel()  # so that nobody can cancel it from outside
        self._lock = threading.Lock()
        self._state = _State.JOINING
        self._next = 0
        self._pieces: Pieces | None = None

    # What the user calls

    @property
    def transfer_id(self) -> str:
        return self.join.transfer_id

    @property
    def ended(self) -> bool:
        """Finished or failed: nothing of it can be used any more."""
        return self._state in (_State.FINISHED, _State.FAILED)

    def send(self, chunk: KVChunk, wait_s: float | None = None) -> None:
        """Copy a chunk into staging and post its writes. Waits for a free slot, not for the write.

        Args:
            wait_s: longest wait for the slot; never beyond the deadline. A node that takes nothing for so long
                counts as stopped.

        Raises:
            RequestError: why the session failed. LeaseExpired: no slot became free in time.
            EngineFailed: the chunk breaks the engine's contract (order, size, block borders).
        """
        ops_of = self._plan(chunk)
        until = self.deadline if wait_s is None else min(self.deadline, time.monotonic() + wait_s)
        slot = self._context.staging.take(self._target, until, lambda: self.ended)
        if slot is None:
            self._end(LeaseExpired("the node did not take the KV in time"))
            raise self._failure()
        self._stage(chunk, slot, ops_of)

    def offer(self, chunk: KVChunk) -> bool:
        """:meth:`send` without a wait. False: no slot is free now, nothing was copied and the session goes on; the
        sender's ``on_slot`` tells when to offer again. Raises as :meth:`send`, and what ``write_into`` raises."""
        ops_of = self._plan(chunk)
        slot = self._context.staging.take(self._target, 0.0, lambda: self.ended)
        if slot is None:
            if self.ended:
                raise self._failure()
            return False
        self._stage(chunk, slot, ops_of)
        return True

    def begin_finish(self) -> Future[int]:
        """Say done when every write is. The future gives the bytes written, or raises why it failed.

        A session that is not through by its deadline stays open: the caller fails it then.
        """
        with self._lock:
            complete = self._next == self.join.tokens
            if self._state is _State.OPEN and complete:
                self._state = _State.FINISHING
        if not complete:
            self._end(EngineFailed(f"prefill sent {self._next} of {self.join.tokens} tokens"))
        self._check_written()
        return self._written

    def finish(self, timeout_s: float | None = None) -> int:
        """Blocking :meth:`begin_finish`; fails the session if ``timeout_s`` (default: its deadline) passes."""
        if timeout_s is None:
            timeout_s = max(0.0, self.deadline - time.monotonic())
        written = self.begin_finish()
        try:
            return written.result(timeout_s)
        except TimeoutError:
            self._end(LeaseExpired("the KV did not reach the node in time"), tell=False)
            return written.result()

    def fail(self, reason: str) -> None:
        """Stop writing and leave. Returns when posted writes were aborted. Idempotent."""
        self._end(RequestCancelled(reason), tell=False, inline=True)

    # What the channel calls

    def accepted(self, accept: Accept, metadata: PeerMetadata) -> bool:
        with self._lock:
            wanted = self._state is _State.JOINING and self.joined.set_running_or_notify_cancel()
            self._state = _State.CONNECTING if wanted else _State.FAILED
        if not wanted:
            return False
        context = self._context
        grant = Grant(accept.region_id, accept.nbytes, accept.grant)
        try:
            peer = context.transport.connect(metadata)
            peer.prepare(grant)  # while the first chunk is computed
        except Exception as error:
            if not isinstance(error, RequestError):
                log.exception("transport %s could not connect", context.transport.name)
                error = TransferFailed("the transport could not reach the node")
            self._state = _State.FAILED
            self.error = error
            self.joined.set_exception(error)
            return False
        self.capacity_tokens = accept.capacity_tokens
        self._pieces = Pieces(
            context.transport, peer, grant, context.staging,
            max_ops=context.max_ops, on_settled=self._check_written, on_failed=self._write_failed,
        )  # fmt: skip
        with self._lock:
            closed = self._state is not _State.CONNECTING  # failed meanwhile
            if not closed:
                self._state = _State.OPEN
        if closed:
            self._pieces.close()
            self.joined.set_exception(self._failure())
            return False
        self.joined.set_result(self)
        return True

    def refused(self, error: RequestError) -> None:
        self._end(error, leave=False)

    def revoked_by_node(self, reason: str) -> None:
        self.revoked = True
        self._end(TransferFailed(f"the node took the landing back: {reason}"))

    def lost(self, error: RequestError) -> None:
        self._end(error, leave=False)

    # Inside

    @property
    def _target(self) -> tuple[str, int]:
        return self._channel.host, self._channel.port

    def _stage(self, chunk: KVChunk, slot: Slot, ops_of: Callable[[Slot], list[WriteOp]]) -> None:
        context = self._context
        try:
            chunk.write_into(slot.region)
            if self._digest is not None:
                self._add_digest(self._digest, chunk, slot)
        except BaseException:
            context.staging.release(slot)
            raise
        pieces = self._pieces
        assert pieces is not None, "an open session has pieces"
        try:
            posted = pieces.post(slot, ops_of(slot))
        except (RequestError, ValueError, OSError) as error:
            log.warning("transfer %s: write refused: %s", self.transfer_id, error)
            self._end(TransferFailed("the transport refused a write"))
            raise self._failure() from error
        if not posted:
            raise self._failure()
        self.nbytes += chunk.nbytes
        self._next = chunk.stop

    def _plan(self, chunk: KVChunk) -> Callable[[Slot], list[WriteOp]]:
        if self._state is not _State.OPEN:
            raise self._failure()
        layout, tokens = self._context.layout, self.join.tokens
        expected = chunk_bytes(layout, chunk.start, chunk.stop, tokens)
        if chunk.start != self._next:
            raise EngineFailed(f"prefill gave the chunk at {chunk.start}, expected {self._next}")
        if chunk.nbytes != expected or chunk.nbytes > self._context.staging.slot_bytes:
            raise EngineFailed(f"prefill gave a chunk of {chunk.nbytes} bytes, expected {expected}")
        try:
            moves = plan_chunk(layout, self.capacity_tokens, chunk.start, chunk.stop, tokens)
        except ValueError as error:
            raise EngineFailed(f"prefill gave a bad chunk: {error}") from error
        return lambda slot: [WriteOp(slot.region, m.source, m.destination, m.nbytes) for m in moves]

    def _add_digest(self, digest: KVDigest, chunk: KVChunk, slot: Slot) -> None:
        view, position = self._context.transport.read(slot.region), 0
        assert view is not None, "verify mode needs memory that can be read"
        for index, group in enumerate(self._context.layout.groups):
            blocks = chunk_blocks(group, chunk.start, chunk.stop, self.join.tokens)
            digest.add_blocks(index, blocks.start, len(blocks), view[position:])
            position += len(blocks) * len(group.layers) * group.block_bytes

    def _failure(self) -> RequestError:
        return self.error or TransferFailed("this hand-over is over")

    def _write_failed(self, cause: BaseException | None) -> None:
        log.warning("transfer %s: write failed: %s", self.transfer_id, cause)
        self._end(TransferFailed("a write to the node failed"))

    def _check_written(self) -> None:
        """Runs in the transport's threads too, so the message itself goes out in a worker."""
        pieces = self._pieces
        with self._lock:
            if self._state is not _State.FINISHING or pieces is None or pieces.pending:
                return
            self._state = _State.FINISHED
        self._in_worker(self._say_done)

    def _say_done(self) -> None:
        join, pieces = self.join, self._pieces
        digest = self._digest.hexdigest() if self._digest is not None else ""
        try:
            self._channel.send(Done(join.transfer_id, join.generation, join.rank, self.nbytes, digest))
        except TransferFailed as error:
            self.error = error
        self._channel.drop(self)
        if pieces is not None:
            pieces.close()
        if self.error is not None:
            self._written.set_exception(self.error)
        else:
            self._written.set_result(self.nbytes)

    def _end(self, error: RequestError, *, tell: bool = True, leave: bool = True, inline: bool = False) -> None:
        with self._lock:
            if self._state in (_State.FINISHED, _State.FAILED):
                return
            before, self._state = self._state, _State.FAILED
            self.error = error
            waited = before is _State.JOINING and self.joined.set_running_or_notify_cancel()
        if waited:
            self.joined.set_exception(error)
        if before in (_State.JOINING, _State.CONNECTING):
            return  # the channel leaves the landing when it is accepted
        self._context.staging.wake()
        self._written.set_exception(error)
        if inline:
            self._tear_down(leave)
        else:
            self._in_worker(lambda: self._tear_down(leave))
        if tell and self._on_end is not None:
            self._on_end(error)

    def _tear_down(self, leave: bool) -> None:
        pieces, join, reason = self._pieces, self.join, self._failure().message
        assert pieces is not None, "only an accepted session is torn down"
        stopped = pieces.stop()
        if leave:
            try:
                self._channel.send(Leave(join.transfer_id, join.generation, join.rank, reason, stopped=stopped))
            except TransferFailed:
                log.info("transfer %s: the node is gone, nothing to leave", self.transfer_id)
        self._channel.drop(self)

    def _in_worker(self, job: Callable[[], None]) -> None:
        try:
            self._context.workers.submit(_logged, job)
        except RuntimeError:  # the sender is closing: its workers are gone
            _logged(job)


def _logged(job: Callable[[], None]) -> None:
    try:
        job()
    except Exception:
        log.exception("the end of a hand-over failed")
