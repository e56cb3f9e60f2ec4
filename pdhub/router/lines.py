"""The lines in front of all prefill instances: :class:`~pdhub.core.turns.TurnQueue`, on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from pdhub.config.models import AdmissionConfig
from pdhub.core.admission import Ticket
from pdhub.core.turns import Ahead, Backlog, TurnQueue, restless
from pdhub.router.gate import Gate


def ahead_of(config: AdmissionConfig) -> Ahead:
    """What the configuration says."""
    return Ahead(config.prefill_ahead_s, config.prefill_ahead_tokens)


class Lines(Gate):
    """Args:
    instances: names. ahead: how much each is sent before it has answered. clock: monotonic seconds.

    Tickets weigh the prompt tokens that have to be computed.
    """

    def __init__(self, instances: Iterable[str], ahead: Ahead, clock: Callable[[], float]) -> None:
        self._turns = {name: TurnQueue(ahead) for name in instances}
        super().__init__(self._turns, clock)
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def told(self) -> Mapping[str, tuple[int, int, int]]:
        """Of each instance: requests that wait, tokens that it was sent and has not answered, and how many these may
        be."""
        return {name: (queue.waiting, queue.load, queue.capacity) for name, queue in self._turns.items()}

    def tokens_ahead(self, instance: str, ticket: Ticket) -> int:
        """Tokens of those that wait there and have their turn before this one."""
        return self._turns[instance].ahead(ticket)

    def backlog(self, pending: Mapping[str, int], ticket: Ticket) -> Backlog | None:
        """What it would have in front of it where that is least; None if there is no instance.

        Args:
            pending: prompt tokens that each instance to ask was sent and has not answered.
        """
        now = self._clock()
        return min((self._turns[name].backlog(ticket, sent, now) for name, sent in pending.items()), default=None)

    def set_ahead(self, ahead: Ahead) -> None:
        """Another bound, from now on."""
        for name, queue in self._turns.items():
            self._admit(name, queue.set_ahead(ahead, self._clock()))
            self._plan(name)

    def offer(self, pool: str, ticket: Ticket) -> bool:
        at_once = super().offer(pool, ticket)
        self._plan(pool)
        return at_once

    def leave(self, pool: str, ticket_id: str, *, served: bool) -> None:
        super().leave(pool, ticket_id, served=served)
        self._plan(pool)
        found = restless(self._turns, pool, self._clock())
        if found is not None:
            self._wake(found[0], found[1].id)

    def _plan(self, name: str) -> None:
        """Look again when the next one may be sent though nothing was answered."""
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()
        now = self._clock()
        at = self._turns[name].next_s(now)
        if at is not None:
            self._timers[name] = asyncio.get_running_loop().call_later(at - now, self._look, name)

    def _look(self, name: str) -> None:
        self._admit(name, self._turns[name].probe(self._clock()))
        self._plan(name)
