"""One attempt of one request: claim, prefill, decode. Whatever happens, both legs end and nothing stays claimed."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pdhub.api.client import Bind, Call, Leg, LegOrder, PrefillResult, Reply
from pdhub.api.errors import (
    AdmissionRejected,
    InvalidRequest,
    LayoutMismatch,
    LeaseExpired,
    ParserFailed,
    RequestCancelled,
    RequestError,
    TransferFailed,
)
from pdhub.api.parser import OutputParser
from pdhub.api.policy import Prediction
from pdhub.api.request import RequestView, Sampling
from pdhub.core.admission import DroppedReason
from pdhub.router.answers import Answerer
from pdhub.router.context import Context
from pdhub.router.edits import Edits
from pdhub.router.endpoint import Endpoint
from pdhub.router.errors import LandingTooSmall, Refused, Unreachable, UpstreamTimeout
from pdhub.router.fleet import Pool, prefill_info
from pdhub.router.flight import Flight, new_id
from pdhub.router.handed import check_handed
from pdhub.router.leftovers import stays
from pdhub.router.openai import ClientRequest
from pdhub.router.result import read_result
from pdhub.router.sampling import with_seed
from pdhub.router.sink import Sink
from pdhub.router.stay import Stay
from pdhub.router.stranded import write_at_last

_NEUTRAL = (
    InvalidRequest,
    AdmissionRejected,
    RequestCancelled,
    LayoutMismatch,
    LandingTooSmall,
    ParserFailed,
    asyncio.CancelledError,
)
_PAIR = (TransferFailed, LeaseExpired)
_SILENT = (Unreachable, UpstreamTimeout)

_CHECK_S = 0.25

_LEARN_AFTER_S = 0.05
"""Seconds after prefill's answer: decode has been called by then."""

WRITTEN_S = 5.0
"""KV whose writer dies later than so long after its prefill was computed has been written: what takes longer is the
answer, of which a client that does not stream hears nothing before its end. A stream that has not begun has no KV."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where an attempt goes. ``prefill`` is None for engines that prefill themselves."""

    pool: Pool
    node: Endpoint
    prefill: Endpoint | None


class Attempt:
    """Args:
    context: what all requests share. view: the policy's view. sampling: resolved for both legs.
    budget_s: what is left of the request's time to its first token. predicted: what the node was chosen for.
    rebind: the decode node chosen again after prefill, for engines that allow it; None = it stays.
    computed: told when the prefill instance has nothing more to do for it.
    """

    def __init__(
        self,
        context: Context,
        choice: Choice,
        request: ClientRequest,
        view: RequestView,
        sampling: Sampling,
        flight: Flight,
        budget_s: float,
        predicted: Prediction,
        rebind: Callable[[Choice], Endpoint | None] = lambda choice: None,
        computed: Callable[[], None] = lambda: None,
    ) -> None:
        self._context = context
        self._choice = choice
        self._request = request
        self._flight = flight
        self._view = view
        self._predicted = predicted
        self._rebind = rebind
        self._computed = computed
        self._stay: Stay | None = None
        self._claim: asyncio.Task[dict[str, object]] | None = None
        self._held = False
        self._asked = False
        self._parser: OutputParser | None = None
        self._waiting = False  # decode was cut off while it waited for its KV
        self._writing = False  # it has a place among the hand-overs of the prefill instance
        self._sent = False  # the prompt went to the prefill instance, which may have taken it
        self._computing: asyncio.Task[None] | None = None
        self._answered_at: float | None = None
        self._expired: int | None = None  # what the instance had given up before it answered
        self._at = choice.node
        self._headers = {"x-request-id": flight.id, **flight.trace}
        prefill = choice.prefill
        capabilities = choice.pool.client.capabilities(choice.node.info)
        features = capabilities.features
        if prefill is not None and (told := prefill_info(prefill).capabilities) is not None:
            features &= told.features
        room = capabilities.max_context
        prompt = max(1, min(request.prompt_high, room - (request.max_tokens or 1)))
        self._leg = Leg(
            transfer_id=new_id(),
            request_id=flight.id,
            request=dataclasses.replace(view, prompt_tokens=prompt),
            body=request.body,
            sampling=with_seed(sampling, features),
            decode=choice.node.target(),
            prefill=prefill.target() if prefill else None,
            max_total_tokens=min(room, prompt + (request.max_tokens or room)),
            budget_s=max(context.plan.config.handoff.deadline_s, budget_s),
        )

    @property
    def choice(self) -> Choice:
        """Where it goes; the node may be another one after prefill."""
        return self._choice

    @property
    def leg(self) -> Leg:
        """What engine clients know of it."""
        return self._leg

    @property
    def at(self) -> Endpoint:
        """Whose turn it was: after an error, the endpoint that it came from."""
        return self._at

    async def run(self, sink: Sink) -> None:
        """All legs, until the client has its answer. Raises a RequestError; ``sink.started`` says how far it came."""
        choice, fleet, clock = self._choice, self._context.fleet, self._context.clock
        self._stay = Stay(
            fleet, self._flight, self._view, choice.pool.name, choice.node, choice.prefill, self._predicted, clock()
        )
        ended = complete = False
        failed: BaseException | None = None
        try:
            await self._open_parser()
            if choice.prefill is not None and choice.pool.client.order_of(self._leg) is LegOrder.TOGETHER:
                await self._both(sink)
                ended = True
            else:
                await self._hand_over()
                self._bind_late()
                watched = choice.prefill is not None and not choice.node.hosted  # ours watch their writers themselves
                leg = self._watched if watched else self._decode
                ended = await leg(sink, self._decode_call())
            complete = True
            choice = self._choice
            choice.node.breaker.success()
            if choice.prefill is not None:
                fleet.pair(choice.prefill.name, choice.node.name).success()
        except BaseException as error:
            failed = error
            self._blame(error)
            raise
        finally:
            self._stay.end(complete, clock())
            if not sink.started:
                self._leave(failed)
            self._leave_handovers()
            if self._parser is not None:
                self._parser.close()
            if not ended:
                self._drop()

    async def _open_parser(self) -> None:
        """Before anything is spent: whoever parses the answer may refuse it."""
        choice, context = self._choice, self._context
        if choice.pool.client.speaks_tokens:
            self._parser = await context.parsing.open(self._request, context.caller, choice.prefill, self._headers)

    async def _hand_over(self) -> None:
        """Claim and prefill; once more with the exact size if the prompt was longer than estimated."""
        try:
            await self._take_landing()
            await self._prefill()
        except LandingTooSmall as error:
            self._context.metrics.reclaims.inc()
            if (dropped := self._drop()) is not None:
                await dropped
            request = dataclasses.replace(self._leg.request, prompt_tokens=error.need)
            self._leg = dataclasses.replace(self._leg, transfer_id=new_id(), request=request, claim=None)
            await self._take_landing()
            await self._prefill()

    async def _take_landing(self) -> None:
        call = self._choice.pool.client.claim(self._leg)
        await self._enter_handovers()
        if call is None:
            return
        node = self._choice.node
        self._held = True
        # Never broken off: a claim that was sent may be granted, and only its answer says so.
        self._claim = asyncio.ensure_future(self._context.caller.document(node, call, headers=self._headers))
        try:
            claim = await asyncio.shield(self._claim)
        except (AdmissionRejected, InvalidRequest, LayoutMismatch):
            self._held = False
            raise
        self._leg = dataclasses.replace(self._leg, claim=claim)

    async def _enter_handovers(self) -> None:
        """Wait until the prefill instance can bear one more hand-over, if its engine says that it bears few."""
        client, instance, clock = self._choice.pool.client, self._choice.prefill, self._context.clock
        if client.handovers is None or instance is None or self._writing:
            return
        since = clock()
        try:
            await instance.handovers.enter(client.handovers, self._leg.budget_s)
        except TimeoutError as error:
            reason = DroppedReason.TTL_EXPIRED.value
            message = "the prefill instance was not done with other hand-overs in time"
            raise AdmissionRejected(message, reason=reason, code="queue_timeout") from error
        finally:
            self._flight.queued_s += clock() - since
        self._writing = True

    def _leave_handovers(self, *, written: bool = False) -> None:
        """``written``: the KV is where it belongs. Otherwise the instance may still be at it, if it ever began."""
        if self._writing:
            self._writing = False
            assert self._choice.prefill is not None
            settles = self._sent and not written
            self._choice.prefill.handovers.leave(self._choice.pool.client.settle_s if settles else 0.0)

    async def _prefill(self) -> None:
        instance, client = self._choice.prefill, self._choice.pool.client
        if instance is None or client.order is LegOrder.DECODE_ONLY:
            return
        call = client.prefill(self._leg)
        if self._held:
            self._context.gate.entered(self._choice.pool.name, self._flight.id)
        if call is not None:
            await self._compute(instance, call)

    async def _compute(self, instance: Endpoint, call: Call) -> None:
        clock = self._context.clock
        sent_at = self._flight.prefill_sent_at = clock()
        instance.count(+1, sent_at)
        if self._stay is not None:
            self._stay.prefilling(sent_at)
        self._at = instance
        self._sent = True
        try:
            body = await self._context.caller.document(instance, call, self._request, self._headers)
            result = read_result(body)
            instance.breaker.success()
            self._computed()
        except InvalidRequest:
            self._sent = False
            raise
        finally:
            instance.count(-1, clock())
        self._at = self._choice.node
        prompt = len(result.prompt_token_ids) or _told_prompt(body)
        self._flight.told(prompt=prompt or None)
        self._answered_at = self._flight.prefilled_at = clock()
        self._expired = instance.load.expired
        if self._stay is not None:
            self._stay.prefilled(sent_at, prompt, result.cached_tokens, self._answered_at)
        self._leg = dataclasses.replace(self._leg, result=result)
        # It takes some milliseconds for a long prompt and helps later requests only: decode must not wait for it.
        learn = self._context.caches.learn
        asyncio.get_running_loop().call_later(_LEARN_AFTER_S, learn, self._request, result.prompt_token_ids)
        instance.learn(self._choice.pool.client.learn(self._leg))
        check_handed(body, self._request.chat)

    async def _both(self, sink: Sink) -> None:
        """Prefill and decode at once. Whatever of them fails first ends the other."""
        instance, call = self._choice.prefill, self._choice.pool.client.prefill(self._leg)
        assert instance is not None
        assert call is not None
        described = self._decode_call()  # both before either is sent: what cannot be described must not cost a prefill
        self._computing = asyncio.ensure_future(self._compute(instance, call))
        try:
            await self._watched(sink, described)
        finally:
            self._computing.cancel()
            (ended,) = await asyncio.gather(self._computing, return_exceptions=True)
            if self._waiting and self._answered_at is None and not isinstance(ended, (InvalidRequest, Unreachable)):
                self._write_at_last(instance, call)
            instance.breaker.neutral()  # ends a trial that was cut off; a failure is told later

    def _write_at_last(self, instance: Endpoint, call: Call) -> None:
        context = self._context
        if self._choice.pool.client.freed_by_write:
            send = functools.partial(context.caller.document, instance, call, self._request, self._headers)
            context.janitor.later(write_at_last(instance, self._choice.node, send, context.clock))

    async def _watched(self, sink: Sink, call: Call) -> bool:
        """The decode leg, while somebody else writes its KV. Once the answer has begun nothing matters of prefill."""
        instance, computing = self._choice.prefill, self._computing
        assert instance is not None
        decoding = asyncio.ensure_future(self._decode(sink, call))
        try:
            while not decoding.done():
                running = [task for task in (decoding, computing) if task is not None and not task.done()]
                await asyncio.wait(running, timeout=_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
                if sink.started:
                    await asyncio.wait([decoding])
                elif computing is not None and computing.done() and (failed := computing.exception()) is not None:
                    self._at = instance
                    raise failed
                elif not decoding.done():
                    self._check_written(instance)
            self._at = self._choice.node
            return decoding.result()
        finally:
            self._waiting = not decoding.done() or isinstance(decoding.exception(), UpstreamTimeout)
            decoding.cancel()
            await asyncio.gather(decoding, return_exceptions=True)

    def _check_written(self, instance: Endpoint) -> None:
        """Decode may wait for ever for KV that nobody writes any more, or fetch what is another prompt's by now. Raises
        TransferFailed, LeaseExpired."""
        if self._answered_at is None:
            return
        waited = self._context.clock() - self._answered_at
        lease_s = self._choice.pool.client.lease_s
        if lease_s is not None and waited >= lease_s and self._given_up(instance):
            raise LeaseExpired("prefill's KV has waited for too long")
        if instance.gone and (self._request.stream or waited < WRITTEN_S):
            raise TransferFailed(f"'{instance.name}' went away during the hand-over")
        late = waited > self._context.plan.config.handoff.deadline_s
        if late and self._computing is not None and self._request.stream:
            raise TransferFailed("the prompt's KV did not arrive in time")

    def _given_up(self, instance: Endpoint) -> bool:
        """Decode was to renew the lease, and nothing tells whether it did. But if the instance has given up more
        prompts since then than those that nobody was to fetch, one of them may be this."""
        before, now = self._expired, instance.load.expired
        if before is None or now is None or self._answered_at is None:
            return False
        return now - before > self._context.leftovers.ended(instance.name, self._answered_at)

    async def _known(self) -> PrefillResult | None:
        """What prefill told; waits for it if it still computes."""
        if self._computing is not None:
            await asyncio.shield(self._computing)
        return self._leg.result

    def _bind_late(self) -> None:
        """The prompt is computed, and whoever decodes it fetches the KV: choose again, from how things are now."""
        client, stay = self._choice.pool.client, self._stay
        late = client.bind is Bind.LATE and client.order is LegOrder.PREFILL_FIRST
        if not late or self._held or self._choice.prefill is None or stay is None:
            return
        now = self._context.clock()
        stay.leave(now)
        node = self._rebind(self._choice) or self._choice.node
        stay.join(node, now)
        self._at = node
        self._choice = dataclasses.replace(self._choice, node=node)
        self._leg = dataclasses.replace(self._leg, decode=node.target())

    def _decode_call(self) -> Call:
        """Raises LeaseExpired if the KV may be gone: whoever fetched it then could get another request's."""
        client, at = self._choice.pool.client, self._answered_at
        if client.lease_s is not None and at is not None and self._context.clock() - at >= client.lease_s:
            raise LeaseExpired("prefill's KV has waited for too long")
        return client.decode(self._leg)

    async def _decode(self, sink: Sink, call: Call) -> bool:
        pool, node, context = self._choice.pool, self._choice.node, self._context
        wait_s = context.plan.config.router.first_byte_timeout_s
        self._asked = True
        if self._held:
            wait_s = self._leg.budget_s + context.plan.config.router.idle_timeout_s
        refused = pool.client.refused
        reply = await context.caller.open(node, call, self._request, self._headers, wait_s, refused)
        self._leave_handovers(written=True)
        context.gate.entered(pool.name, self._flight.id)
        answer = Answerer(
            context.caller, node, self._request, self._flight, sink, context.shown(self._flight), context.clock, wait_s
        )
        async with reply:
            if call.reply is not Reply.TOKENS:
                await answer.relay(reply, self._edits(call))
                return True
            assert context.text is not None, "loaded at start because a pool speaks tokens"
            told = prefill_info(self._choice.prefill).eos_token_ids if self._choice.prefill else frozenset()
            eos = told or context.generation.eos_token_ids
            frames = pool.client.frames_of(self._leg)
            return await answer.tokens(reply, self._leg, frames, context.text, eos, self._parser)

    def _edits(self, call: Call) -> Edits:
        wanted = "prompt_logprobs" in call.drop and self._request.body.get("prompt_logprobs") is not None
        upstream = str(call.set.get("model") or self._request.model)
        return Edits(upstream, self._request.model, self._known, prompt_logprobs=wanted)

    def _blame(self, error: BaseException) -> None:
        """Tell the breakers. A client's mistake, a busy engine and a client that left say nothing about health."""
        now = self._context.clock()
        node, prefill = self._choice.node, self._choice.prefill
        at = self._at
        pair = self._context.fleet.pair(prefill.name, node.name) if prefill else None
        if isinstance(error, AdmissionRejected) and not error.contended and at.hosted:
            at.draining = True  # until a probe says otherwise
        for endpoint in (node, prefill):
            if endpoint is not None:
                endpoint.breaker.neutral()
        if pair is not None:
            pair.neutral()
        if isinstance(error, _NEUTRAL) or not isinstance(error, RequestError):
            return
        if prefill is not None:
            prefill.learned = {}
        if at is prefill:
            self._context.metrics.prefill_failures.labels(at.name).inc()
        if isinstance(error, _PAIR) and pair is not None:
            pair.failure(now)
        else:
            at.breaker.failure(now)
        if at is node and self._sent and isinstance(error, _SILENT) and self._choice.pool.client.fence_s:
            node.breaker.fence(now, self._choice.pool.client.fence_s)
        self._context.fleet.changed()

    def _leave(self, error: BaseException | None) -> None:
        """Note the KV that prefill keeps for a decode leg that will not fetch it."""
        client, instance, at = self._choice.pool.client, self._choice.prefill, self._answered_at
        if instance is None or at is None or client.lease_s is None:
            return
        waited = self._context.clock() - at
        if stays(client, client.order_of(self._leg), error, asked=self._asked, waited_s=waited):
            self._context.leftovers.add(instance.name, at + client.lease_s)
            self._context.metrics.left_to_lease.labels(instance.name).inc()

    def _drop(self) -> asyncio.Task[None] | None:
        """Tell the node to forget this attempt, in the background."""
        if not self._held:
            return None
        self._held = False
        leg = self._leg
        call = self._choice.pool.client.cancel(leg)
        if call is None:
            return None
        send = functools.partial(self._send_cancel, self._choice.node, call)
        return self._context.janitor.cancel(send, self._claim)

    async def _send_cancel(self, node: Endpoint, call: Call) -> None:
        """404 = it has nothing of that attempt, or does not know yet what was sent a moment ago."""
        for last in (False, True):
            try:
                await self._context.caller.document(node, call, limit_s=2.0)
                return
            except Refused as error:
                if error.status != 404:
                    raise
            if not last:
                await asyncio.sleep(_CHECK_S)


def _told_prompt(body: Mapping[str, Any]) -> int:
    told = (body.get("usage") or {}).get("prompt_tokens")
    return told if isinstance(told, int) else 0
