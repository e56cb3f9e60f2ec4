"""The worker's side: copies each piece of KV out of vLLM's cache as soon as it is computed, and sends it.

vLLM's own thread only leaves notes here and never waits for a node. One thread reads them, takes whichever hand-over
has KV and a free staging slot, copies and posts. A node that takes nothing runs out of its share of the slots; its
requests' blocks then simply stay in vLLM's cache until the hand-over has failed, and nobody else notices.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from pdhub.api.errors import EngineFailed, LeaseExpired, RequestCancelled, RequestError
from pdhub.api.prefill import KVChunk
from pdhub.api.transport import Region
from pdhub.connector.handover import Handover
from pdhub.connector.steps import Advance, End, Failure, Report, Start
from pdhub.sender import LandingTooSmall, Sender, Session

log = logging.getLogger("pdhub.connector")


class Source(Protocol):
    """Reads the cache."""

    align: int

    def mark(self) -> Any:
        """In vLLM's thread, after a forward pass was launched: what to wait for before its KV is read."""

    def nbytes(self, start: int, stop: int, tokens: int) -> int:
        """Bytes of a piece."""

    def copy(self, handover: Handover, start: int, stop: int, region: Region) -> None:
        """Copy a piece to the front of a staging slot; returns when it is there."""


class _Void(Exception):
    """The blocks went away between the look and the copy."""


class Pump:
    """See the module's text. All methods but :meth:`close` return at once; :meth:`preempt` waits for one copy.

    Args:
        make_sender: given ``on_slot``; the pump closes what it returns.
        rank, writers: this worker's shard and how many there are.
        most: tokens of one piece, what a staging slot holds.
    """

    def __init__(
        self,
        make_sender: Callable[[Callable[[], None]], Sender],
        source: Source,
        *,
        rank: int = 0,
        writers: int = 1,
        most: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._rank, self._writers, self._most, self._clock = source, rank, writers, most, clock
        self._changed = threading.Condition()
        self._dirty = False
        self._closing = False
        self._copying = threading.Lock()
        self._handovers: dict[str, Handover] = {}
        self._released: set[str] = set()
        self._failures: dict[str, Failure] = {}
        self.handed_over = 0
        self.failed = 0
        self._sender = make_sender(self._wake)
        self._leaving = ThreadPoolExecutor(4, thread_name_prefix="pdhub-leave")
        self._thread = threading.Thread(target=self._run, name="pdhub-pump", daemon=True)
        self._thread.start()

    # vLLM's thread

    def start(self, start: Start) -> None:
        """Join the landing."""
        joined = self._sender.begin_join(
            start.params, start.tokens, rank=self._rank, writers=self._writers, on_end=lambda error: self._wake()
        )
        with self._changed:
            if start.req_id in self._handovers:  # an id that is used again: the older one is over
                self._leave(self._handovers.pop(start.req_id), RequestCancelled("another request took its id"))
            self._handovers[start.req_id] = Handover(start, joined, self._clock() + start.params.budget_s)
        joined.add_done_callback(lambda _: self._wake())

    def advance(self, advance: Advance, mark: Any) -> None:
        """KV was computed, once ``mark`` is reached."""
        if advance.fresh:
            self.preempt(advance.req_id)
        with self._changed:
            handover = self._handovers.get(advance.req_id)
            if handover is not None:
                handover.advance(advance, mark)
        self._wake()

    def forget_before(self, req_id: str, token: int) -> None:
        """Earlier tokens may leave the cache of a sliding window from now on."""
        with self._copying, self._changed:
            handover = self._handovers.get(req_id)
            if handover is not None:
                handover.floor = max(handover.floor, token)

    def preempt(self, req_id: str) -> None:
        """The blocks are about to be overwritten: when this returns nothing reads them."""
        with self._copying, self._changed:
            handover = self._handovers.get(req_id)
            if handover is not None:
                handover.void()

    def end(self, end: End) -> None:
        """vLLM is through with the request; a held one is to be reported by :meth:`released`."""
        with self._changed:
            handover = self._handovers.get(end.req_id)
            if handover is not None:
                handover.end = end
            elif end.held:
                self._released.add(end.req_id)
        self._wake()

    def released(self) -> set[str]:
        """Held requests whose blocks nothing reads any more, each once."""
        with self._changed:
            released, self._released = self._released, set()
        return released

    def report(self) -> Report | None:
        """Hand-overs that failed since the last call."""
        with self._changed:
            failures, self._failures = self._failures, {}
        return Report(failures) if failures else None

    @property
    def active(self) -> int:
        """Hand-overs that are not over."""
        return len(self._handovers)

    def close(self) -> None:
        """Fail what is open and end every thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._sender.close()
        self._leaving.shutdown(wait=True)

    # The pump's thread

    def _wake(self) -> None:
        with self._changed:
            self._dirty = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._dirty and not self._closing:
                    live = (h.deadline for h in self._handovers.values() if h.error is None)
                    left = min(live, default=math.inf) - self._clock()
                    if left <= 0:
                        break
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                if self._closing:
                    return
                self._dirty = False
                work = list(self._handovers.values())
            self._pass(work)

    def _pass(self, work: list[Handover]) -> None:
        """One piece of each in turn, as long as anything moves."""
        while work and not self._closing:
            work = [handover for handover in work if self._attempt(handover)]

    def _attempt(self, handover: Handover) -> bool:
        """True if it should be asked again at once."""
        moved = False
        try:
            if handover.error is None and self._clock() >= handover.deadline:
                raise LeaseExpired("the KV did not reach the node in time")
            if handover.error is None:
                moved = self._push(handover)
        except RequestError as error:
            self._fail(handover, error)
        except Exception:
            log.exception("transfer %s: copying KV failed", handover.start.params.transfer_id)
            self._fail(handover, EngineFailed("the prefill instance could not copy the KV"))
        self._settle(handover)
        return moved

    def _push(self, handover: Handover) -> bool:
        session = self._session(handover)
        if session is None:
            return False
        if session.error is not None:
            raise session.error
        with self._changed:
            start, stop = handover.copied, handover.ready(self._source.align, self._most)
            epoch = handover.epoch
        if stop == start:
            return False

        def write_into(region: Region) -> None:
            with self._copying:
                if handover.epoch != epoch:
                    raise _Void
                self._source.copy(handover, start, stop, region)

        try:
            if not session.offer(KVChunk(start, stop, self._source.nbytes(start, stop, handover.tokens), write_into)):
                return False
        except _Void:
            return True
        handover.copied = stop
        if stop == handover.tokens:
            handover.written = session.begin_finish()
            handover.written.add_done_callback(lambda _: self._wake())
        return True

    def _session(self, handover: Handover) -> Session | None:
        if handover.session is None and handover.joined.done():
            handover.session = handover.joined.result()
        return handover.session

    def _fail(self, handover: Handover, error: RequestError) -> None:
        start = handover.start
        log.warning("transfer %s: %s", start.params.transfer_id, error.message)
        need = error.need if isinstance(error, LandingTooSmall) else 0
        with self._changed:
            handover.error = error
            self._failures[start.req_id] = Failure(error.code, error.message, need)
        self.failed += 1
        self._leave(handover, error)

    def _settle(self, handover: Handover) -> None:
        """Let vLLM have its blocks back, and forget what is over."""
        with self._changed:
            end = handover.end
            if end is None or not handover.drained or self._handovers.get(end.req_id) is not handover:
                return
            if end.held:
                self._released.add(end.req_id)
                handover.end = End(end.req_id, False, end.complete)
            cancelled = handover.error is None and not end.complete and handover.copied < handover.tokens
            over = cancelled or handover.error is not None or (handover.written is not None and handover.written.done())
            if over:
                del self._handovers[end.req_id]
        if cancelled:
            self._leave(handover, RequestCancelled("vLLM ended the request before its prompt was computed"))
        elif over and handover.error is None:
            self.handed_over += 1

    def _leave(self, handover: Handover, error: RequestError) -> None:
        """Stop writing. That waits for aborts, so it is done elsewhere."""
        if handover.joined.cancel():
            return
        handover.joined.add_done_callback(partial(self._leave_joined, error.message))

    def _leave_joined(self, reason: str, joined: Future[Session]) -> None:
        if joined.cancelled() or joined.exception() is not None:
            return
        try:
            self._leaving.submit(joined.result().fail, reason)
        except RuntimeError:  # closing: the sender fails what is left
            log.debug("the sender fails %s", joined.result().transfer_id)
