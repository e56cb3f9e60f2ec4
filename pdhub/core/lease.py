"""Who may write into which landing, and when its memory may be used again: a state machine without I/O.

::

    CLAIMED ──join──▶ WRITING ──all done──▶ READY ──start_decode──▶ DECODING ──finish──▶ RELEASED
       │                 │                    │                         │ cancel: StopDecode, then finish
       └────── cancel, expire, leave, writer_vanished ──────┐           ▼
                                                            ▼
                                                      QUARANTINED ──every writer done, left or fenced──▶ RELEASED

Every event returns the effects that the host must perform, in order, and nothing else happens. Every event may come
in any state, twice, or for a transfer that never was. Time alone never frees a landing: it only makes the table ask
for a fence, and, if that cannot be proven, for a restart.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, Generic

from pdhub.api.errors import (
    AdmissionRejected,
    InvalidRequest,
    LeaseExpired,
    RequestCancelled,
    RequestError,
    TransferFailed,
)
from pdhub.core.lease_effects import (
    Effect,
    Ended,
    Fence,
    Grant,
    L,
    Ready,
    Refusal,
    Refuse,
    Release,
    Restart,
    Revoke,
    StopDecode,
)
from pdhub.core.lease_state import Lease, LeaseState, LeaseTimes, Terms, Writer, WriterPhase
from pdhub.core.pool import Landings

REMEMBERED: Final = 4096
"""Transfer ids that ended and are refused if they come again."""

_FENCE_SLACK_S: Final = 1.0


class LeaseTable(Generic[L]):
    """All leases of a node.

    Args:
        capacity: landings.
        times: limits.
        clock: monotonic seconds.
        first_generation: generations count up from here. A node passes something that grows over restarts, so
            that a writer of an earlier life is stale.
    """

    def __init__(self, capacity: int, times: LeaseTimes, clock: Callable[[], float], first_generation: int = 1) -> None:
        self.landings = Landings(capacity)
        self._times = times
        self._clock = clock
        self._generation = first_generation - 1
        self._leases: dict[str, Lease[L]] = {}
        self._ended: OrderedDict[str, RequestError | None] = OrderedDict()
        self._restart_asked = False

    # -- reading ---------------------------------------------------------------------------------------------

    def get(self, transfer_id: str) -> Lease[L] | None:
        """The live lease; None if there never was one or it was released."""
        return self._leases.get(transfer_id)

    def __iter__(self) -> Iterator[Lease[L]]:
        return iter(list(self._leases.values()))

    def __len__(self) -> int:
        return len(self._leases)

    def counts(self) -> dict[str, int]:
        """Live leases by state; every state is there."""
        out = {state.value: 0 for state in LeaseState if state is not LeaseState.RELEASED}
        for lease in self._leases.values():
            out[lease.state.value] += 1
        return out

    def next_deadline(self) -> float | None:
        """When :meth:`expire` has something to do next."""
        return min((x.deadline for x in self._leases.values() if x.deadline is not None), default=None)

    # -- the claim -------------------------------------------------------------------------------------------

    def admit(self, transfer_id: str) -> None:
        """Would :meth:`claim` work? Call it before memory is reserved.

        Raises:
            InvalidRequest: the id is live, was used before, or was cancelled before it came.
            AdmissionRejected: every landing is taken.
        """
        if transfer_id in self._leases or transfer_id in self._ended:
            raise InvalidRequest(f"transfer {transfer_id} was used before", code="duplicate_transfer")
        if not self.landings.free:
            raise AdmissionRejected("every landing of this node is taken", reason="no-landing")

    def claim(self, transfer_id: str, landing: L, terms: Terms, ttl_s: float) -> Lease[L]:
        """Make a lease over a landing that the caller reserved. Raises like :meth:`admit`.

        Args:
            ttl_s: the lease ends if no writer joined by then.
        """
        self.admit(transfer_id)
        self.landings.take()
        self._generation += 1
        lease = Lease(transfer_id, self._generation, landing, terms, self._clock() + ttl_s)
        self._leases[transfer_id] = lease
        return lease

    # -- writers ---------------------------------------------------------------------------------------------

    def join(
        self, owner: str, transfer_id: str, generation: int, rank: int, writers: int, tokens: int
    ) -> list[Effect[L]]:
        """A writer asks for the landing's address. ``tokens``: exact prompt tokens it will write."""

        def refuse(code: Refusal, message: str, need: int = 0) -> list[Effect[L]]:
            return [Refuse(owner, transfer_id, code, message, need)]

        lease = self._leases.get(transfer_id)
        if lease is None:
            return refuse(Refusal.UNKNOWN, "no such transfer, or it ended")
        if generation != lease.generation:
            return refuse(Refusal.STALE, f"generation {generation} is not this lease's")
        if lease.state not in (LeaseState.CLAIMED, LeaseState.WRITING):
            return refuse(Refusal.UNKNOWN, f"the lease is {lease.state}")
        terms = lease.terms
        if writers != terms.writers or not 0 <= rank < writers:
            return refuse(Refusal.LAYOUT, f"writer {rank} of {writers}; the landing has {terms.writers} shards")
        if tokens < 1:
            return refuse(Refusal.FAILED, "a prompt has at least one token")
        if tokens > terms.prompt_limit:
            return refuse(Refusal.CONTEXT, "prompt and output do not fit the context", tokens)
        if tokens > terms.capacity_tokens:
            return refuse(Refusal.TOO_SMALL, f"the landing holds {terms.capacity_tokens} tokens", tokens)
        if lease.writers and tokens != lease.tokens:
            return refuse(Refusal.FAILED, f"another writer said {lease.tokens} tokens, this one {tokens}")
        known = lease.writers.get(rank)
        if known is not None and (known.owner != owner or known.phase is not WriterPhase.WRITING):
            return refuse(Refusal.FAILED, f"shard {rank} has a writer")
        if known is None:
            lease.writers[rank] = Writer(owner)
            lease.tokens = tokens
            if lease.state is LeaseState.CLAIMED:
                lease.state = LeaseState.WRITING
                lease.joined_at = self._clock()
                lease.deadline = lease.joined_at + self._times.deadline_s
        return [Grant(owner, transfer_id, generation, rank, lease.landing)]

    def done(
        self, owner: str, transfer_id: str, generation: int, rank: int, nbytes: int, digest: str = ""
    ) -> list[Effect[L]]:
        """A writer's bytes are all visible; it writes no more."""
        found = self._writer(owner, transfer_id, generation, rank)
        if found is None:
            return []
        lease, writer = found
        writer.phase, writer.nbytes, writer.digest = WriterPhase.DONE, nbytes, digest
        if lease.state is LeaseState.QUARANTINED:
            return self._settle(lease)
        if len(lease.writers) < lease.terms.writers or lease.open_writers:
            return []
        lease.state = LeaseState.READY
        lease.ready_at = self._clock()
        lease.deadline = None if lease.expected else lease.ready_at + self._times.ready_ttl_s
        return [Ready(transfer_id)]

    def leave(
        self, owner: str, transfer_id: str, generation: int, rank: int, reason: str, stopped: bool = True
    ) -> list[Effect[L]]:
        """A writer gave up. ``stopped`` False: it cannot promise that no byte of it lands any more."""
        found = self._writer(owner, transfer_id, generation, rank)
        if found is None:
            return []
        lease, writer = found
        if stopped:
            writer.phase = WriterPhase.STOPPED
        return self._fail(lease, TransferFailed(f"the KV could not be sent: {reason}"), fence=not stopped)

    def writer_vanished(self, owner: str) -> list[Effect[L]]:
        """A connection ended: whatever its writers had not finished may still be written to."""
        out: list[Effect[L]] = []
        for lease in self:
            if any(w.owner == owner for _, w in lease.open_writers):
                out += self._fail(lease, TransferFailed("the writer of the KV went away"), fence=True)
        return out

    def fenced(self, transfer_id: str, generation: int, ok: bool) -> list[Effect[L]]:
        """The answer to :class:`Fence`: True if no write can reach the landing any more."""
        lease = self._leases.get(transfer_id)
        if lease is None or lease.generation != generation or not lease.fencing:
            return []
        lease.fencing = False
        lease.deadline = None
        if ok:
            for _, writer in lease.open_writers:
                writer.phase = WriterPhase.STOPPED
        return self._settle(lease) or self._restart(f"the landing of transfer {transfer_id} could not be fenced")

    # -- ending ----------------------------------------------------------------------------------------------

    def cancel(self, transfer_id: str, reason: str = "cancelled") -> list[Effect[L]]:
        """Somebody wants no answer any more. A cancel that overtakes its claim makes the claim fail."""
        return self.fail(transfer_id, RequestCancelled(reason))

    def fail(self, transfer_id: str, error: RequestError) -> list[Effect[L]]:
        """As :meth:`cancel`, with another error for whoever waits."""
        lease = self._leases.get(transfer_id)
        if lease is None:
            if transfer_id not in self._ended:
                self._remember(transfer_id, error)
            return []
        return self._fail(lease, error, fence=False)

    def expire(self) -> list[Effect[L]]:
        """Look at the clock. Ends leases whose time is over; frees nothing that a writer could still reach."""
        now = self._clock()
        out: list[Effect[L]] = []
        for lease in self:
            if lease.deadline is None or lease.deadline > now:
                continue
            if lease.state is LeaseState.QUARANTINED:
                if lease.fencing:
                    lease.deadline = None
                    out += self._restart(f"fencing the landing of transfer {lease.transfer_id} does not end")
                else:
                    out += self._fence(lease)
            else:
                out += self._fail(lease, LeaseExpired(_EXPIRED[lease.state]), fence=False)
        return out

    # -- decode ----------------------------------------------------------------------------------------------

    def expect(self, transfer_id: str, generation: int) -> Lease[L]:
        """Somebody waits to decode; from now on only that one's patience ends a READY lease.

        Raises:
            InvalidRequest: somebody else does already.
            LeaseExpired: there is no such lease. Any other RequestError: why the lease ended.
        """
        lease = self._leases.get(transfer_id)
        if lease is None:
            raise _fresh(self._ended.get(transfer_id), "no such transfer, or it ended")
        if lease.generation != generation:
            raise LeaseExpired("the transfer's generation is not this lease's")
        if lease.state is LeaseState.QUARANTINED:
            raise _fresh(lease.error, "the transfer ended")
        if lease.expected:
            raise InvalidRequest("this transfer is decoded already", code="duplicate_transfer")
        lease.expected = True
        if lease.state is LeaseState.READY:
            lease.deadline = None
        return lease

    def start_decode(self, transfer_id: str, generation: int) -> Lease[L]:
        """READY → DECODING. From here the landing is read, so it stays until :meth:`finish`, whatever happens.

        Raises the reason if the lease is not READY.
        """
        lease = self._leases.get(transfer_id)
        if lease is None or lease.generation != generation or lease.state is not LeaseState.READY:
            error = lease.error if lease is not None else self._ended.get(transfer_id)
            raise _fresh(error, "the transfer is not ready")
        lease.state = LeaseState.DECODING
        lease.deadline = None
        return lease

    def finish(self, transfer_id: str) -> list[Effect[L]]:
        """The stream ended, well or not, and nobody reads the landing any more."""
        lease = self._leases.get(transfer_id)
        if lease is None or lease.state is not LeaseState.DECODING:
            return []
        return self._release(lease)

    # -- inside ----------------------------------------------------------------------------------------------

    def _writer(self, owner: str, transfer_id: str, generation: int, rank: int) -> tuple[Lease[L], Writer] | None:
        """The open writer that speaks; None for anybody else, who is not believed."""
        lease = self._leases.get(transfer_id)
        if lease is None or lease.generation != generation:
            return None
        writer = lease.writers.get(rank)
        if writer is None or writer.owner != owner or writer.phase is not WriterPhase.WRITING:
            return None
        return lease, writer

    def _fail(self, lease: Lease[L], error: RequestError, *, fence: bool) -> list[Effect[L]]:
        """End a lease. ``fence``: a writer is lost, asking it to leave is no use."""
        out: list[Effect[L]] = []
        if lease.state is LeaseState.DECODING:
            if lease.stopping:
                return []
            lease.stopping, lease.error = True, error
            return [StopDecode(lease.transfer_id)]
        if lease.state is not LeaseState.QUARANTINED:
            lease.state, lease.error = LeaseState.QUARANTINED, error
            lease.deadline = self._clock() + self._times.revoke_s
            out.append(Ended(lease.transfer_id, error))
            out += [
                Revoke(w.owner, lease.transfer_id, lease.generation, rank, error.message)
                for rank, w in lease.open_writers
            ]
        out += self._settle(lease)
        if fence and lease.open_writers:
            out += self._fence(lease)
        return out

    def _fence(self, lease: Lease[L]) -> list[Effect[L]]:
        if lease.fencing:
            return []
        lease.fencing = True
        lease.deadline = self._clock() + self._times.fence_within_s + _FENCE_SLACK_S
        return [Fence(lease.transfer_id, lease.generation, lease.landing)]

    def _settle(self, lease: Lease[L]) -> list[Effect[L]]:
        """Release a quarantined lease once nothing can hit it. A fence at work is waited for: it uses the memory."""
        if lease.open_writers or lease.fencing:
            return []
        return self._release(lease)

    def _release(self, lease: Lease[L]) -> list[Effect[L]]:
        lease.state = LeaseState.RELEASED
        lease.deadline = None
        del self._leases[lease.transfer_id]
        self._remember(lease.transfer_id, lease.error)
        self.landings.give_back()
        return [Release(lease.transfer_id, lease.generation, lease.landing)]

    def _remember(self, transfer_id: str, error: RequestError | None) -> None:
        self._ended[transfer_id] = error
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _restart(self, reason: str) -> list[Effect[L]]:
        if self._restart_asked:
            return []
        self._restart_asked = True
        return [Restart(reason)]


def _fresh(error: RequestError | None, otherwise: str) -> RequestError:
    """A copy to raise: one exception raised many times would collect every raiser's traceback."""
    return LeaseExpired(otherwise) if error is None else copy.copy(error)


_EXPIRED: Final = {
    LeaseState.CLAIMED: "no writer joined before the claim ended",
    LeaseState.WRITING: "the KV did not arrive before the deadline",
    LeaseState.READY: "nobody asked for the KV in time",
}
