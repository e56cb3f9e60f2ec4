"""The writes of one session that are not over yet, and the staging slots that they read."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from pdhub.api.transport import Grant, Peer, Transfer, TransferState, Transport, WriteOp
from pdhub.sender.staging import Slot, Staging

log = logging.getLogger("pdhub.sender")


@dataclass(eq=False, slots=True)
class _Piece:
    """One staged chunk: the writes numbered in ``open`` are not final. ``dirty``: one failed or was aborted, so that
    the slot may still be read; of an abort that is only so if the transport is wrong."""

    slot: Slot
    open: set[int]
    dirty: bool = False
    transfers: list[Transfer] = field(default_factory=list)


class Pieces:
    """Posts writes and frees each slot exactly when nothing can read it any more: done, or failed or aborted with the
    peer closed.

    Args:
        peer: of this session alone, so that closing it harms no other.
        on_settled: a slot came back; ``on_failed``: a write failed. Called from the transport's threads.
    """

    def __init__(
        self,
        transport: Transport,
        peer: Peer,
        grant: Grant,
        staging: Staging,
        *,
        max_ops: int,
        on_settled: Callable[[], None],
        on_failed: Callable[[BaseException | None], None],
    ) -> None:
        self._transport, self._peer, self._grant, self._staging = transport, peer, grant, staging
        self._max_ops = max_ops
        self._on_settled, self._on_failed = on_settled, on_failed
        self._posting = threading.Lock()
        self._lock = threading.Lock()
        self._pieces: set[_Piece] = set()
        self._stopped = False
        self._peer_closed = False

    @property
    def pending(self) -> int:
        """Staged chunks whose writes are not over."""
        with self._lock:
            return len(self._pieces)

    def post(self, slot: Slot, ops: Sequence[WriteOp]) -> bool:
        """Write a staged chunk; the slot is ours from here on. False: stopped before, nothing was posted.

        Raises whatever the transport raises; what it posted before goes on, and :meth:`stop` ends it.
        """
        step = self._max_ops or max(1, len(ops))
        batches = [ops[i : i + step] for i in range(0, len(ops), step)]
        piece = _Piece(slot, set(range(len(batches))))
        with self._posting:
            with self._lock:
                if self._stopped:
                    self._staging.release(slot)
                    return False
                self._pieces.add(piece)
            for number, batch in enumerate(batches):
                try:
                    transfer = self._transport.write(
                        self._peer, self._grant, batch, on_done=partial(self._over, piece, number)
                    )
                except BaseException:
                    with self._lock:
                        piece.open.difference_update(range(number, len(batches)))
                        self._settle(piece)
                    raise
                piece.transfers.append(transfer)
        return True

    def stop(self) -> bool:
        """End every write and close the peer. True if it is proven that no byte can land any more. Call once."""
        with self._lock:
            self._stopped = True
        with self._posting, self._lock:  # a post under way ends; none starts after it
            live = [transfer for piece in self._pieces for transfer in piece.transfers]
        outcomes = [_ended(transfer) for transfer in live]  # every one, also after the first that cannot stop
        proven = all(outcomes)
        self.close()
        return proven

    def close(self) -> None:
        """Close the peer; slots of failed and aborted writes become free. Idempotent."""
        try:
            self._peer.close()
        finally:
            with self._lock:
                self._peer_closed = True
                for piece in list(self._pieces):
                    self._settle(piece)

    def _over(self, piece: _Piece, number: int, transfer: Transfer) -> None:
        with self._lock:
            if number not in piece.open:
                return  # a transport that says done twice must not free a slot that its other write still reads
            piece.open.discard(number)
            failed = transfer.state is TransferState.FAILED
            piece.dirty |= transfer.state is not TransferState.DONE
            self._settle(piece)
        if failed:
            self._on_failed(transfer.error)
        else:
            self._on_settled()

    def _settle(self, piece: _Piece) -> None:
        if not piece.open and piece in self._pieces and (self._peer_closed or not piece.dirty):
            self._pieces.discard(piece)
            self._staging.release(piece.slot)


def _ended(transfer: Transfer) -> bool:
    try:
        stopped = transfer.abort()
    except Exception:
        log.exception("abort of a transfer failed")
        stopped = False
    return stopped or transfer.state in (TransferState.DONE, TransferState.ABORTED)
