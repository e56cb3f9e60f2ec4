"""One decode call's life: wait for the KV, wait for a slot, check, inject, stream, give everything back."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from pdhub.api.engine import DecodeRequest, Finished, Handoff, TokenChunk
from pdhub.api.errors import (
    AdmissionRejected,
    EngineFailed,
    InvalidRequest,
    LeaseExpired,
    RequestCancelled,
    RequestError,
    TransferFailed,
)
from pdhub.api.transport import Region
from pdhub.core.digest import landing_digest
from pdhub.core.lease_state import Lease
from pdhub.node.blocking import in_thread
from pdhub.node.receiver import Receiver, Reserved
from pdhub.wire import http as wire

log = logging.getLogger("pdhub.node")

Emit = Callable[[list[wire.Frame]], Awaitable[None]]
"""Sends frames to the router; raises if it cannot."""

LONGEST_WAIT_S: Final = 3600.0


class DecodeStream:
    """One POST /decode.

    Args:
        body: validated. request: the same for the engine. verify: compare digests before inject.
    """

    def __init__(self, receiver: Receiver, body: wire.DecodeBody, request: DecodeRequest, *, verify: bool) -> None:
        self._receiver = receiver
        self._body = body
        self._request = request
        self._verify = verify
        self._mine = False

    async def run(self, emit: Emit) -> None:
        """Stream to the end. Raises a RequestError; whatever happens, slot and landing are given back.

        Nothing is emitted before the engine's first item, so that every earlier error can still be a status.
        """
        outcome = "cancelled"
        try:
            await self._run(emit)
            outcome = "ok"
        except RequestError as error:
            outcome = error.code
            raise
        finally:
            self._receiver.metrics.ended(outcome)

    async def _run(self, emit: Emit) -> None:
        tid, receiver = self._body.transfer_id, self._receiver
        called = time.monotonic()
        lease = await self._admit()
        try:
            held = time.monotonic()
            await self._check_digests(lease)
            _go_on(lease)
            await self._inject(lease)
            started = _started(lease, called, held)
            _go_on(lease)
            receiver.streaming(tid)
            await self._stream(lease, started, emit)
        except RequestCancelled:
            _go_on(lease)  # the engine only knows that it was told to stop; the lease knows why
            raise
        finally:
            receiver.finish(tid)

    async def _admit(self) -> Lease[Reserved]:
        """The KV is complete and a slot is held; on the way out by an error nothing is."""
        body, receiver = self._body, self._receiver
        lease = receiver.expect(body.transfer_id, body.generation)
        self._mine = True
        late: RequestError = LeaseExpired("the KV did not arrive in time")
        try:
            async with asyncio.timeout(min(body.wait_s, LONGEST_WAIT_S)):
                await receiver.ready(lease)
                self._check_prompt(lease)
                late = AdmissionRejected("every slot of this node is busy", reason="no-slot")
                await receiver.slot(body.transfer_id)
            return receiver.start_decode(body.transfer_id, body.generation)
        except TimeoutError:
            self._give_up(late)
            raise late from None
        except BaseException as error:
            self._give_up(error if isinstance(error, RequestError) else EngineFailed("the request was stopped"))
            raise

    def _give_up(self, error: RequestError) -> None:
        self._receiver.fail(self._body.transfer_id, error)
        self._receiver.leave_slot(self._body.transfer_id)

    def dropped(self) -> None:
        """The router is gone. Another call's transfer of the same id is none of this one's business."""
        if self._mine:
            self._receiver.cancel(self._body.transfer_id, "the router dropped the connection")

    def _check_prompt(self, lease: Lease[Reserved]) -> None:
        prompt = len(self._body.prompt_token_ids)
        if prompt != lease.tokens:
            raise InvalidRequest(f"{prompt} prompt tokens, but the KV is of {lease.tokens}", param="prompt_token_ids")
        limit = lease.landing.max_total_tokens
        if prompt + self._body.max_tokens > limit:
            raise InvalidRequest(
                f"{prompt} prompt tokens and max_tokens {self._body.max_tokens} exceed the {limit} that were claimed",
                param="max_tokens",
                code="context_length_exceeded",
            )

    async def _check_digests(self, lease: Lease[Reserved]) -> None:
        if not self._verify:
            return
        landing = lease.landing.landing
        for rank, region in enumerate(landing.regions):
            said = lease.writers[rank].digest

            def compute(region: Region = region) -> str:
                view = self._receiver.read(region)
                if view is None:
                    raise TransferFailed("digest cannot be checked: the landing cannot be read")
                return landing_digest(view, landing.layout, landing.tokens, lease.tokens)

            found = await in_thread(compute, "pdhub-digest")
            if found != said:
                self._receiver.metrics.digest_failures.inc()
                log.error("transfer %s: digest %s of shard %d, sent %s", lease.transfer_id, found, rank, said or "none")
                raise TransferFailed("digest of the KV differs from what was sent")

    async def _inject(self, lease: Lease[Reserved]) -> None:
        try:
            await self._receiver.engine.inject(lease.landing.landing, Handoff(lease.tokens, lease.nbytes))
        except RequestError:
            raise
        except Exception as error:
            log.exception("transfer %s: inject failed", lease.transfer_id)
            raise EngineFailed("the engine could not use the KV") from error

    async def _stream(self, lease: Lease[Reserved], started: wire.Started, emit: Emit) -> None:
        receiver, tid = self._receiver, lease.transfer_id
        frames = [wire.Frame(s=started)]
        items = receiver.engine.decode(lease.landing.landing, self._request)
        async with _closing(items):
            while True:
                item = await self._next(items)
                if lease.stopping:
                    receiver.engine.cancel(tid)  # an engine may learn of a stream only at its first item
                if frames:
                    receiver.trace.add("first_token", tid)
                frames.append(_frame(item))
                if isinstance(item, TokenChunk):
                    receiver.metrics.tokens.inc(len(item.token_ids))
                else:
                    receiver.trace.add("finished", tid)
                try:
                    await emit(frames)
                except BaseException:
                    receiver.cancel(tid, "the router does not read")
                    raise
                if isinstance(item, Finished):
                    return
                frames = []

    async def _next(self, items: AsyncIterator[TokenChunk | Finished]) -> TokenChunk | Finished:
        try:
            return await anext(items)
        except StopAsyncIteration:
            raise EngineFailed("the engine's stream ended without a result") from None
        except RequestError:
            raise
        except Exception as error:
            log.exception("transfer %s: the engine failed", self._body.transfer_id)
            raise EngineFailed("the engine failed") from error


@asynccontextmanager
async def _closing(items: AsyncIterator[TokenChunk | Finished]) -> AsyncIterator[None]:
    """An engine's iterator need not be a generator; one that is must have ended before its landing is freed."""
    try:
        yield
    finally:
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()


def _started(lease: Lease[Reserved], called: float, held: float) -> wire.Started:
    """``called``: when the decode call came; ``held``: when it had its slot."""
    ready = max(called, lease.ready_at)
    return wire.Started(
        handoff_ms=_ms((ready - called) + (time.monotonic() - held)),
        wait_ms=_ms(held - ready),
        kv_bytes=lease.nbytes,
        transfer_ms=_ms(lease.ready_at - lease.joined_at),
    )


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _go_on(lease: Lease[Reserved]) -> None:
    """Raises why the lease was stopped, if it was."""
    if lease.stopping:
        raise copy.copy(lease.error) if lease.error else EngineFailed("the request was stopped")


def _frame(item: TokenChunk | Finished) -> wire.Frame:
    if isinstance(item, Finished):
        return wire.Frame(done=wire.Done(item.reason.value, item.completion_tokens, item.stop_token))
    logprobs = [(lp.token_id, lp.logprob, list(lp.top)) for lp in item.logprobs] or None
    return wire.Frame(t=list(item.token_ids), lp=logprobs)
