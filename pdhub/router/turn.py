"""One request in front of prefill instances: where it waits for its turn, and whether it has it."""

from __future__ import annotations

from collections.abc import Callable

from pdhub.core.admission import Ticket
from pdhub.core.doors import look_at
from pdhub.router.context import Context
from pdhub.router.endpoint import Endpoint
from pdhub.router.flight import Flight


class Turn:
    """Args:
    ticket: weighs its prompt. deadline: monotonic seconds at which its first token is due.

    ``instance`` is the one that it waits for, or may send its prompt to; None: neither.
    """

    def __init__(self, context: Context, flight: Flight, ticket: Ticket, deadline: float) -> None:
        self.instance: Endpoint | None = None
        self._context = context
        self._flight = flight
        self._ticket = ticket
        self._deadline = deadline

    def offer(self, instance: Endpoint) -> bool:
        """Ask for it: True = it is there, False = :meth:`wait` for it. One that it had elsewhere is given back.

        Raises:
            AdmissionRejected: 429 when the deadline has passed, 503 when the router shuts down.
        """
        self.leave()
        at_once = self._context.lines.offer(instance.name, self._ticket)
        self.instance = instance
        return at_once

    async def wait(self, look: Callable[[], Endpoint | None]) -> bool:
        """True when its turn has come; False if it is to go elsewhere.

        Args:
            look: the instance to wait for by now, None = elsewhere; asked from time to time. May raise what ends the
                request.

        Raises:
            AdmissionRejected: its deadline passed, it was shed, or the router shuts down.
        """
        lines, clock = self._context.lines, self._context.clock
        since, mine = clock(), False
        try:
            while not mine:
                assert self.instance is not None
                mine = await lines.wait(self.instance.name, self._ticket, look_at(self._deadline, clock()))
                if mine:
                    break
                better = look()
                if better is None:
                    return False
                if better is not self.instance:
                    mine = self.offer(better)
            return True
        finally:
            if not mine:
                self.leave()
            self._flight.queued_s += clock() - since

    def answered(self) -> None:
        """The prompt is computed: whoever is next may be sent."""
        self._end(served=True)

    def leave(self) -> None:
        """Give it back, or wait no longer. Idempotent."""
        self._end(served=False)

    def _end(self, *, served: bool) -> None:
        if self.instance is not None:
            name, self.instance = self.instance.name, None
            self._context.lines.leave(name, self._ticket.id, served=served)
