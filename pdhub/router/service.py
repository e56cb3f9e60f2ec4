"""One request's life: parse, choose, wait for a place, attempt, and again elsewhere while nothing was sent.

::

    1 parse      openai.py, slo.py        wrong requests end here
    2 choose     the policy               over frozen views of all pools
    3 admit      gate.py, lines.py        wait for a place in the chosen pool, and for a turn at a prefill instance
    4 claim  ┐
    5 prefill│   attempt.py               both legs; whatever fails, both end
    6 decode ┘
    7 finish     here                     exactly one end; the outcome goes to metrics, policy and observers
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from pdhub.api.errors import AdmissionRejected, RequestError
from pdhub.router.context import Context
from pdhub.router.errors import Overdue, code_of, event_of, reply_of, status_of
from pdhub.router.flight import Flight
from pdhub.router.journey import Journey
from pdhub.router.openai import parse_request
from pdhub.router.sink import Sink
from pdhub.router.slo import read_asked

log = logging.getLogger("pdhub.router")

TELL_S = 5.0
"""How long a client may take to read an error; one that reads nothing must not hold the connection for ever."""


class Service:
    """Args:
    context: what all requests share.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    async def serve(self, endpoint: str, headers: Mapping[str, str], body: bytes, sink: Sink) -> None:
        """Answer one request, with an error if need be. Raises only CancelledError: the client left.

        Args:
            headers: lower-cased names.
        """
        with self._context.requests:
            flight = Flight.begin(headers, self._context.clock(), self._context.rules)
            await self._serve(endpoint, headers, body, flight, sink)

    async def _serve(self, endpoint: str, headers: Mapping[str, str], body: bytes, flight: Flight, sink: Sink) -> None:
        outcome, code = "cancelled", None
        try:
            async with asyncio.timeout(self._context.plan.config.router.total_timeout_s):
                await self._run(endpoint, headers, body, flight, sink)
            outcome = "ok"
        except asyncio.CancelledError:
            code = "request_cancelled"
            raise
        except Exception as error:  # noqa: BLE001  every end of a request is an answer
            shown = self._explain(error, flight)
            outcome, code = outcome_of(shown), code_of(shown)
            if isinstance(shown, AdmissionRejected) and shown.reason:
                self._context.metrics.refused.labels(flight.pool or "", shown.reason).inc()
            await self._fail(shown, flight, sink)
        finally:
            self._finish(flight, outcome, code)

    async def refuse(self, headers: Mapping[str, str], error: RequestError, sink: Sink) -> None:
        """Answer a request that did not even have a readable body."""
        flight = Flight.begin(headers, self._context.clock(), self._context.rules)
        try:
            await self._fail(error, flight, sink)
        finally:
            self._finish(flight, outcome_of(error), code_of(error))

    async def _run(self, endpoint: str, headers: Mapping[str, str], body: bytes, flight: Flight, sink: Sink) -> None:
        context = self._context
        model = context.plan.config.model
        request = parse_request(endpoint, body, model.name, model.aliases, reasons=context.parsing.reasons)
        flight.model, flight.prefix = request.served, request.prefix
        rules = flight.rules
        flight.asked = read_asked(headers, request.body, rules.classes, context.metrics.unreadable)
        flight.headers = {name: headers[name] for name in rules.headers if name in headers}
        await Journey(self._context, request, flight, sink).run()

    def _explain(self, error: Exception, flight: Flight) -> Exception:
        """What the client is told. Foreign errors go to the log, whole."""
        if isinstance(error, RequestError):
            level = logging.INFO if status_of(error) < 500 else logging.WARNING
            log.log(level, "request %s: %s", flight.id, error.message)
            return error
        if isinstance(error, TimeoutError):
            limit = self._context.plan.config.router.total_timeout_s
            return Overdue(f"the request took longer than {limit:g} s")
        log.error("request %s failed unexpectedly", flight.id, exc_info=error)
        return error

    async def _fail(self, error: Exception, flight: Flight, sink: Sink) -> None:
        try:
            async with asyncio.timeout(TELL_S):
                if sink.started:
                    # The stream was a success until now: its one terminal event is this error, without an end mark.
                    await sink.write(event_of(error))
                else:
                    reply = reply_of(error)
                    await sink.start(reply.status, {**reply.headers, **self._context.shown(flight)})
                    await sink.write(reply.body)
                await sink.end()
        except TimeoutError:
            log.info("request %s: the client does not read its error", flight.id)

    def _finish(self, flight: Flight, outcome: str, code: str | None) -> None:
        context = self._context
        record = flight.record(outcome, code, context.clock())
        context.records.append(record)
        context.metrics.finished(record, flight.decision.rule if flight.decision else None)
        if flight.entry is not None:
            context.decisions.ended(flight.entry, record)
        for policy in (context.rules.policy, context.rules.prefill):
            try:
                policy.observe(record)
            except Exception:  # a plugin's; the request it learns from has long been answered
                log.exception("%s failed to observe request %s", type(policy).__name__, record.id)
        if context.observer is not None:
            context.observer.offer(record)
        log.info(
            "request %s%s: %s%s pool=%s node=%s reason=%s tokens=%d+%d%s total_ms=%.1f",
            record.id, f" ({flight.client_id})" if flight.client_id else "", outcome, f" {code}" if code else "",
            record.pool, record.node, record.reason, record.prompt_tokens, record.completion_tokens,
            " (estimated)" if record.estimated else "", record.total_ms,
        )  # fmt: skip


def outcome_of(error: Exception) -> str:
    """The closed set of outcomes: ``ok``, ``cancelled``, ``client_error``, ``rejected``, ``error``."""
    if isinstance(error, AdmissionRejected):
        return "rejected"
    return "client_error" if 400 <= status_of(error) < 500 else "error"
