"""Where lease table, engine and transport meet: performs what the table decides.

Everything here runs on the node's loop. The transport blocks, so its calls run in threads; their answers come back
as events of the table.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdhub.api.engine import ClaimRequest, DecodeEngine, EngineInfo, Landing
from pdhub.api.errors import (
    AdmissionRejected,
    EngineFailed,
    InvalidRequest,
    LayoutMismatch,
    RequestCancelled,
    RequestError,
)
from pdhub.api.transport import Region, Transport
from pdhub.core.lease import LeaseTable
from pdhub.core.lease_effects import (
    Effect,
    Ended,
    Fence,
    Grant,
    Ready,
    Refuse,
    Release,
    Restart,
    Revoke,
    StopDecode,
)
from pdhub.core.lease_state import Lease, LeaseState, LeaseTimes, Terms, WriterPhase
from pdhub.core.pool import SlotQueue
from pdhub.node.blocking import in_thread
from pdhub.node.trace import Trace
from pdhub.telemetry.node import NodeMetrics
from pdhub.wire import control
from pdhub.wire.errors import context_length_message
from pdhub.wire.http import ClaimBody

log = logging.getLogger("pdhub.node")

STOP_SLACK_S: Final = 2.0
"""Beyond ``cancel_within_s``: an engine whose stream still runs then cannot give its slot back; restart."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """What a lease holds: the engine's landing and the tokens it may grow to while decoding."""

    landing: Landing
    max_total_tokens: int


Send = Callable[[control.ControlMessage], None]


class Receiver:
    """One a node.

    Args:
        engine, info: started. transport: open.
        capacity: landings. times: of the lease table. claim_ttl_s: longest life of a claim without a writer.
        restart: called, once, with the reason why this process must be replaced.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        info: EngineInfo,
        transport: Transport,
        *,
        capacity: int,
        times: LeaseTimes,
        claim_ttl_s: float,
        metrics: NodeMetrics,
        restart: Callable[[str], None],
    ) -> None:
        self.engine = engine
        self.info = info
        self.slots = SlotQueue(info.capabilities.slots)
        self.trace = Trace()
        self.metrics = metrics
        self.refuse_claims: str | None = None
        self.refuse_joins = False
        self.table: LeaseTable[Reserved] = LeaseTable(
            capacity, times, time.monotonic, first_generation=time.time_ns() // 1_000_000
        )
        self._layouts = {layout.fingerprint: layout for layout in info.accepts}
        self._transport = transport
        self._times = times
        self._claim_ttl_s = claim_ttl_s
        self._restart = restart
        self._senders: dict[str, Send] = {}
        self._waiters: dict[str, asyncio.Future[None]] = {}
        self._streaming: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.idle = asyncio.Event()
        self.idle.set()

    # -- claims (HTTP) -------------------------------------------------------------------------------------

    def claim(self, body: ClaimBody) -> tuple[Lease[Reserved], str]:
        """Reserve a landing; the lease and its layout's fingerprint. Raises a RequestError."""
        try:
            lease = self._claim(body)
        except RequestError as error:
            self.metrics.refused(error.code)
            raise
        self.idle.clear()
        self.trace.add("claimed", body.transfer_id)
        self._arm()
        return lease, lease.landing.landing.layout.fingerprint

    def _claim(self, body: ClaimBody) -> Lease[Reserved]:
        if self.refuse_claims is not None:
            raise AdmissionRejected(f"this node is {self.refuse_claims}", contended=False, code="draining")
        layout = self._layouts.get(body.fingerprint)
        if layout is None:
            raise LayoutMismatch("this node does not take the prefill's KV layout")
        context = self.info.capabilities.max_context
        limit = context - max(1, body.max_tokens)
        if limit < 1:
            raise InvalidRequest(
                f"max_tokens {body.max_tokens} leaves no room for a prompt in a context of {context} tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )
        self.table.admit(body.transfer_id)
        # `tokens` is an upper estimate, so it may exceed what fits although the exact prompt does not.
        tokens = min(body.tokens, limit)
        total = context if body.max_tokens == 0 else tokens + body.max_tokens
        landing = self._reserve(ClaimRequest(body.transfer_id, tokens, total, layout))
        # The engine promised room for `tokens` and the output; a landing rounded up to whole blocks promises no more.
        terms = Terms(tokens, limit, len(landing.regions))
        ttl_s = min(body.ttl_s, self._claim_ttl_s)
        return self.table.claim(body.transfer_id, Reserved(landing, total), terms, ttl_s)

    def _reserve(self, request: ClaimRequest) -> Landing:
        try:
            return self.engine.claim(request)
        except RequestError:
            raise
        except MemoryError as error:
            raise AdmissionRejected("this node has no memory for the KV now", reason="no-landing") from error
        except Exception as error:
            log.exception("transfer %s: the engine failed to claim", request.transfer_id)
            raise EngineFailed("the engine could not reserve memory") from error

    def read(self, region: Region) -> memoryview | None:
        """A landing's bytes, for digests. Blocks."""
        return self._transport.read(region)

    def cancel(self, transfer_id: str, reason: str) -> None:
        """End a transfer in whatever state it is. Idempotent."""
        self.fail(transfer_id, RequestCancelled(reason or "cancelled"))

    def fail(self, transfer_id: str, error: RequestError) -> None:
        """As :meth:`cancel`, with the error that a waiting decode gets."""
        self._perform(self.table.fail(transfer_id, error))

    # -- writers (control channel) ---------------------------------------------------------------------------

    def connected(self, owner: str, send: Send) -> None:
        """A sender said hello; ``send`` queues a message to it and never raises."""
        self._senders[owner] = send

    def vanished(self, owner: str) -> None:
        """A sender's connection ended."""
        self._senders.pop(owner, None)
        self._perform(self.table.writer_vanished(owner))

    async def join(self, owner: str, fingerprint: str, message: control.Join) -> None:
        """Answer a join with an accept or a refusal. ``fingerprint``: the layout of the sender's hello."""
        lease = self.table.get(message.transfer_id)
        if self.refuse_joins:
            self._refuse(owner, message.transfer_id, control.RefusedCode.DRAINING, "this node is closing")
            return
        if lease is not None and lease.landing.landing.layout.fingerprint != fingerprint:
            text = "the landing was claimed for another KV layout than the hello's"
            self._refuse(owner, message.transfer_id, control.RefusedCode.LAYOUT, text)
            return
        effects = self.table.join(
            owner, message.transfer_id, message.generation, message.rank, message.writers, message.tokens
        )
        for effect in effects:
            if isinstance(effect, Grant):
                self._arm()
                await self._grant(effect)
            else:
                self._perform([effect])

    def done(self, owner: str, message: control.Done) -> None:
        """A writer finished."""
        if self.table.get(message.transfer_id) is not None:
            self.trace.add("done", message.transfer_id)
        nbytes = max(0, message.nbytes)
        self._perform(
            self.table.done(owner, message.transfer_id, message.generation, message.rank, nbytes, message.digest[:128])
        )

    def leave(self, owner: str, message: control.Leave) -> None:
        """A writer gave up."""
        self._perform(
            self.table.leave(
                owner, message.transfer_id, message.generation, message.rank, message.reason[:200], message.stopped
            )
        )

    async def _grant(self, grant: Grant[Reserved]) -> None:
        region = grant.landing.landing.regions[grant.rank]
        tid, generation, rank = grant.transfer_id, grant.generation, grant.rank
        try:
            right = await in_thread(lambda: self._transport.grant(region.id, grant.owner), "pdhub-grant")
        except Exception:
            log.exception("transfer %s: the transport gave no right to write", tid)
            right = None
        lease = self.table.get(tid)
        if right is not None and lease is not None and lease.generation == generation:
            writer = lease.writers.get(rank)
            if lease.state is LeaseState.WRITING and writer is not None and writer.phase is WriterPhase.WRITING:
                capacity = grant.landing.landing.tokens
                self._send(grant.owner, control.Accept(tid, generation, capacity, region.id, region.nbytes, right.data))
                self.trace.add("joined", tid)
                return
        # The lease ended meanwhile, or there is no right: the writer never learnt the address, so it has stopped.
        self._refuse(grant.owner, tid, control.RefusedCode.UNKNOWN, "the transfer ended")
        self._perform(self.table.leave(grant.owner, tid, generation, rank, "it could not be let in", True))

    # -- decode ----------------------------------------------------------------------------------------------

    def expect(self, transfer_id: str, generation: int) -> Lease[Reserved]:
        """A decode call came, at most one a lease. Raises why it cannot be served."""
        lease = self.table.expect(transfer_id, generation)
        self._arm()
        return lease

    async def ready(self, lease: Lease[Reserved]) -> None:
        """Until the KV is complete. Raises why it will not be."""
        if lease.state is not LeaseState.READY:
            await self._wait(lease.transfer_id)

    async def slot(self, transfer_id: str) -> None:
        """Until a slot is held. Raises why it will not be."""
        if not self.slots.ask(transfer_id):
            await self._wait(transfer_id)
        self.trace.add("slot", transfer_id)

    def start_decode(self, transfer_id: str, generation: int) -> Lease[Reserved]:
        """From here the caller must end with :meth:`finish`."""
        return self.table.start_decode(transfer_id, generation)

    def streaming(self, transfer_id: str) -> None:
        """The engine's stream is about to open: from now on it is the engine that stops it."""
        self._streaming.add(transfer_id)

    def finish(self, transfer_id: str) -> None:
        """The stream ended and nobody reads the landing. Gives slot and landing back."""
        self._streaming.discard(transfer_id)
        self._perform(self.table.finish(transfer_id))
        self.leave_slot(transfer_id)

    def leave_slot(self, transfer_id: str) -> None:
        """Give a slot back, or leave the line. Idempotent."""
        for granted in self.slots.give_back(transfer_id):
            self._wake(granted, None)

    async def _wait(self, transfer_id: str) -> None:
        waiter = self._waiters[transfer_id] = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            self._waiters.pop(transfer_id, None)

    def _wake(self, transfer_id: str, error: RequestError | None) -> None:
        waiter = self._waiters.get(transfer_id)
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(copy.copy(error))

    # -- effects ---------------------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[Effect[Reserved]]) -> None:
        for effect in effects:
            match effect:
                case Refuse():
                    self._refuse(effect.owner, effect.transfer_id, effect.code, self._text(effect), effect.need)
                case Revoke():
                    self._send(effect.owner, control.Revoke(effect.transfer_id, effect.generation, effect.reason))
                case Fence():
                    self._spawn(self._fence(effect))
                case Ready():
                    self._ready(effect.transfer_id)
                case StopDecode():
                    self._stop(effect.transfer_id)
                case Ended():
                    cancelled = isinstance(effect.error, RequestCancelled)
                    log.info("transfer %s ended: %s", effect.transfer_id, effect.error.message)
                    self.trace.add("cancelled" if cancelled else "failed", effect.transfer_id)
                    self._wake(effect.transfer_id, effect.error)
                case Release():
                    self._release(effect)
                case Restart():
                    self._restart(effect.reason)
                case Grant():
                    raise RuntimeError("only a join grants")
        self._arm()

    def _ready(self, transfer_id: str) -> None:
        lease = self.table.get(transfer_id)
        assert lease is not None, "the table said ready"
        self.metrics.kv_bytes.inc(lease.nbytes)
        self.metrics.handoff.observe(lease.ready_at - lease.joined_at)
        self.trace.add("ready", transfer_id)
        self._wake(transfer_id, None)

    def _stop(self, transfer_id: str) -> None:
        self.trace.add("cancelled", transfer_id)
        if transfer_id not in self._streaming:
            return  # the host itself sees `stopping` before it opens the stream
        self.engine.cancel(transfer_id)
        within = self.info.capabilities.cancel_within_s + STOP_SLACK_S
        lease = self.table.get(transfer_id)
        generation = lease.generation if lease is not None else 0
        asyncio.get_running_loop().call_later(within, self._must_have_stopped, transfer_id, generation)

    def _must_have_stopped(self, transfer_id: str, generation: int) -> None:
        lease = self.table.get(transfer_id)
        if lease is not None and lease.generation == generation:
            self._restart(f"the engine did not end the stream of transfer {transfer_id}")

    def _release(self, release: Release[Reserved]) -> None:
        try:
            self.engine.release(release.landing.landing)
        except Exception:
            log.exception("the engine failed to release the landing of transfer %s", release.transfer_id)
        self.trace.add("released", release.transfer_id)
        if not len(self.table):
            self.idle.set()

    async def _fence(self, fence: Fence[Reserved]) -> None:
        within, regions = self._times.fence_within_s, fence.landing.landing.regions

        def revoke() -> bool:
            until = time.monotonic() + within
            return all(self._transport.fence(r.id, max(0.0, until - time.monotonic())) for r in regions)

        try:
            ok = await in_thread(revoke, "pdhub-fence")
        except Exception:
            log.exception("transfer %s: the transport failed to fence", fence.transfer_id)
            ok = False
        log.info("transfer %s: landing %s", fence.transfer_id, "fenced" if ok else "NOT fenced")
        self.metrics.fenced(ok)
        self.trace.add("fenced", fence.transfer_id)
        self._perform(self.table.fenced(fence.transfer_id, fence.generation, ok))

    def _text(self, refuse: Refuse) -> str:
        """The client reads the one about the context, so that one has the numbers."""
        lease = self.table.get(refuse.transfer_id)
        if refuse.code != control.RefusedCode.CONTEXT or lease is None:
            return refuse.message
        context = self.info.capabilities.max_context
        return context_length_message(context, refuse.need, context - lease.terms.prompt_limit)

    def _refuse(self, owner: str, transfer_id: str, code: str, message: str, need: int = 0) -> None:
        self.metrics.refused(str(code))
        self._send(owner, control.Refused(transfer_id, str(code), message, need))

    def _send(self, owner: str, message: control.ControlMessage) -> None:
        send = self._senders.get(owner)
        if send is not None:
            send(message)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _arm(self) -> None:
        """Wake up when the table has something to do."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.table.next_deadline()
        if deadline is not None:
            delay = max(0.0, deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._perform(self.table.expire())

    def end_all(self) -> None:
        """Take nothing more, and end every live lease."""
        self.refuse_claims = self.refuse_claims or "closing"
        self.refuse_joins = True
        for lease in self.table:
            self.fail(lease.transfer_id, EngineFailed("the node is shutting down"))

    async def close(self, within_s: float) -> None:
        """After :meth:`end_all`: wait, at most ``within_s`` seconds, until all memory is free."""
        try:
            async with asyncio.timeout(within_s):
                await self.idle.wait()
        except TimeoutError:
            log.warning("closing with %d leases that could not be ended", len(self.table))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
