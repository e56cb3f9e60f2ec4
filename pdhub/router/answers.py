"""The decode leg's answer on its way to the client: tokens presented, or bytes relayed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pdhub.api.client import FrameParser, Leg
from pdhub.api.engine import TokenChunk
from pdhub.api.errors import EngineFailed
from pdhub.api.parser import OutputParser
from pdhub.router.caller import DOCUMENT_LIMIT, Caller
from pdhub.router.edits import Edits
from pdhub.router.endpoint import Endpoint
from pdhub.router.flight import Flight
from pdhub.router.openai import ClientRequest
from pdhub.router.presentation import Envelope, ParsedPresenter, Presenter, TextDecoder
from pdhub.router.refusal import from_event
from pdhub.router.relay import UpstreamReply
from pdhub.router.sink import Sink
from pdhub.router.sse import StreamWatch, error_in

STREAM = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
DOCUMENT = {"content-type": "application/json"}

_KEPT_BACK = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
        "upgrade", "content-length", "content-encoding", "server", "date", "set-cookie", "x-request-id", "alt-svc",
        "endpoint-load-metrics",
    }
)  # fmt: skip
"""Hop-by-hop, or about the connection to the engine rather than to the client."""


class Answerer:
    """One answer of one attempt.

    Args:
        extra: headers of the router's own, for every answer.
        wait_s: longest wait for the first piece of a token stream: KV and a slot.
    """

    def __init__(
        self,
        caller: Caller,
        endpoint: Endpoint,
        request: ClientRequest,
        flight: Flight,
        sink: Sink,
        extra: Mapping[str, str],
        clock: Callable[[], float],
        wait_s: float,
    ) -> None:
        self._caller = caller
        self._endpoint = endpoint
        self._request = request
        self._flight = flight
        self._sink = sink
        self._extra = extra
        self._clock = clock
        self._wait_s = wait_s

    async def tokens(
        self,
        reply: UpstreamReply,
        leg: Leg,
        frames: FrameParser,
        text: TextDecoder,
        eos: frozenset[int],
        parser: OutputParser | None = None,
    ) -> bool:
        """Present a token stream.

        Args:
            parser: splits the text into reasoning, content and tool calls; None = all of it is content.

        Returns:
            True if the engine came to its end; False if a stop string ended the answer and the engine must be told.
        """
        request, presenter = self._request, self._presenter(leg, text, eos, parser)
        while not presenter.finished:
            data = await self._next(reply, waiting=not frames.stats() and self._flight.first_at is None)
            if not data:
                frames.eof()
                raise EngineFailed(f"'{self._endpoint.name}' ended its stream too early")
            items = frames.feed(data)
            self._flight.stats = frames.stats()
            count = sum(len(item.token_ids) for item in items if isinstance(item, TokenChunk))
            if count:
                self._flight.tokens(count, self._clock())
            events = presenter.feed(items) if isinstance(presenter, Presenter) else await presenter.feed(items)
            if events:
                await self._send(STREAM, b"".join(events))
        if presenter.stopped:
            reply.abort()
        self._flight.completion_tokens = presenter.completion_tokens
        if request.stream:
            await self._send(STREAM, b"".join(presenter.finish()))
        else:
            await self._send(DOCUMENT, presenter.document())
        await self._sink.end()
        if not presenter.stopped:
            await reply.finish()
        return not presenter.stopped

    def _presenter(
        self, leg: Leg, text: TextDecoder, eos: frozenset[int], parser: OutputParser | None
    ) -> Presenter | ParsedPresenter:
        request, result = self._request, leg.result
        envelope = Envelope(
            request_id=("chatcmpl-" if request.chat else "cmpl-") + self._flight.id,
            model=request.model,
            created=int(time.time()),
            prompt_token_ids=result.prompt_token_ids if result else (),
            prompt_tokens=self._flight.prompt_tokens,
            cached_tokens=result.cached_tokens if result else None,
            service_tier=self._flight.tier,
        )
        if parser is not None:
            return ParsedPresenter(parser, text, envelope, body=request.body, eos_token_ids=eos)
        return Presenter(text, envelope, endpoint=request.endpoint, body=request.body, eos_token_ids=eos)

    async def relay(self, reply: UpstreamReply, edits: Edits) -> None:
        """Pass an OpenAI answer on, byte for byte but for ``edits``."""
        self._flight.untold(self._request.prompt_low)
        kind = reply.headers.get("content-type", "")
        if self._request.stream:
            if not kind.startswith("text/event-stream"):
                raise await self._unexpected(reply)
            await self._relay_stream(reply, edits)
        else:
            await self._relay_document(reply, edits)

    async def _relay_stream(self, reply: UpstreamReply, edits: Edits) -> None:
        watch = StreamWatch()
        held = b""
        while not watch.done:
            data = await self._next(reply, waiting=watch.events == 0)
            before = watch.texts
            held += watch.feed(data) if data else watch.rest()
            if watch.texts > before:
                self._flight.tokens(watch.texts - before, self._clock())
            # Comments alone do not commit the status: the first event may still be an error.
            if held and (watch.events > (watch.error is not None)):
                await self._send(self._headers(reply), await edits.events(held))
                held = b""
            if watch.error is not None:
                raise from_event(watch.error, self._endpoint)
            if not data:
                break
        if not (watch.done or watch.finished):
            raise EngineFailed(f"'{self._endpoint.name}' ended its stream before its last event")
        self._usage(watch.usage)
        await self._sink.end()
        await reply.finish()

    async def _relay_document(self, reply: UpstreamReply, edits: Edits) -> None:
        raw = await reply.read(DOCUMENT_LIMIT)
        try:
            document = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise EngineFailed(f"'{self._endpoint.name}' answered with something that is not JSON") from error
        if not isinstance(document, dict):
            raise EngineFailed(f"'{self._endpoint.name}' answered with something that is not a JSON object")
        if (told := error_in(raw)) is not None:
            raise from_event(told, self._endpoint)
        self._usage(document.get("usage"))
        await self._send(self._headers(reply), await edits.document(raw, self._request.chat))
        await self._sink.end()

    async def _next(self, reply: UpstreamReply, *, waiting: bool) -> bytes:
        if waiting:
            data = await self._caller.while_alive(self._endpoint, reply.read_some(self._wait_s))
        else:
            data = await reply.read_some()
        self._endpoint.served(self._clock())
        return data

    async def _send(self, headers: Mapping[str, str], data: bytes) -> None:
        if not self._sink.started:
            await self._sink.start(200, {**headers, **self._extra})
        await self._sink.write(data)

    async def _unexpected(self, reply: UpstreamReply) -> EngineFailed:
        raw = await reply.read(DOCUMENT_LIMIT)
        if (told := error_in(raw)) is not None:
            raise from_event(told, self._endpoint)
        return EngineFailed(f"'{self._endpoint.name}' did not answer with a stream")

    def _headers(self, reply: UpstreamReply) -> dict[str, str]:
        return {
            name: value
            for name, value in reply.headers.items()
            if name not in _KEPT_BACK and not name.startswith("x-pdhub-")
        }

    def _usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        self._flight.told(
            prompt if isinstance(prompt, int) else None, completion if isinstance(completion, int) else None
        )
