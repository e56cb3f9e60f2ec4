"""The life of one posted write, shared by the built-in transports."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pdhub.api import OnDone, Transfer, TransferFailed, TransferState

log = logging.getLogger("pdhub.transports")


class Aborted(Exception):
    """Raised inside a worker whose transfer somebody aborts."""


class Posting(Transfer):
    """A transfer that a worker thread runs: :meth:`begin`, then :meth:`finish`.

    Args:
        on_done: the caller's callback.
        abort_within_s: how long :meth:`abort` waits for the worker to stop.
    """

    def __init__(self, on_done: OnDone | None, abort_within_s: float = 1.0) -> None:
        self._on_done = on_done
        self._abort_within_s = abort_within_s
        self._changed = threading.Condition()
        self._state = TransferState.POSTED
        self._error: BaseException | None = None
        self._begun = False
        self._stopped = False
        self.aborting = False
        self.interrupt: Callable[[], None] | None = None
        """Set by a worker that may block where it cannot see ``aborting``; called once by an abort."""

    @property
    def state(self) -> TransferState:
        return self._state

    @property
    def error(self) -> BaseException | None:
        return self._error

    def wait(self, timeout_s: float | None = None) -> TransferState:
        with self._changed:
            self._changed.wait_for(lambda: self._state is not TransferState.POSTED, timeout_s)
            return self._state

    def abort(self) -> bool:
        with self._changed:
            if self._state is not TransferState.POSTED:
                return self._stopped
            self.aborting = True
            begun, interrupt = self._begun, self.interrupt
        if not begun:
            self.finish(TransferState.ABORTED)
        elif interrupt is not None:
            interrupt()
        self.wait(self._abort_within_s)
        with self._changed:
            return self._state is not TransferState.POSTED and self._stopped

    def begin(self) -> bool:
        """The worker starts on it. False: it was aborted first, leave it alone."""
        with self._changed:
            if self.aborting or self._state is not TransferState.POSTED:
                return False
            self._begun = True
            return True

    def finish(self, state: TransferState, error: BaseException | None = None, *, stopped: bool = True) -> None:
        """Make ``state`` final; the first call wins. ``stopped``: no byte can land any more, and that is proven."""
        with self._changed:
            if self._state is not TransferState.POSTED:
                return
            self._state, self._error, self._stopped = state, error, stopped
            callback, self._on_done = self._on_done, None
        if callback is not None:
            try:
                callback(self)
            except Exception:  # a caller's mistake must not end the worker that others rely on
                log.exception("on_done raised")
        with self._changed:
            self._changed.notify_all()


def refused(why: str, on_done: OnDone | None) -> Transfer:
    """A transfer that failed before it began."""
    posting = Posting(on_done)
    posting.finish(TransferState.FAILED, TransferFailed(why))
    return posting
