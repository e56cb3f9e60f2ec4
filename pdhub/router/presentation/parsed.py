"""Presents one chat answer whose text a parser splits into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pdhub.api.engine import Finished, FinishReason, TokenChunk
from pdhub.api.parser import OutputParser, ParsedDelta, ParsedMessage, Piece
from pdhub.router.presentation.base import Envelope, Presentation, logprob_format, shape_arguments
from pdhub.router.presentation.chat import ChatShape
from pdhub.router.presentation.options import CHAT, Options
from pdhub.router.presentation.pieces import Pieces
from pdhub.router.presentation.shape import DONE, Ending
from pdhub.router.presentation.text import TextDecoder

CALLED: Final = "tool_calls"


class ParsedPresenter(Presentation):
    """As :class:`~pdhub.router.presentation.Presenter`, for chat, with a parser in between. Its ``feed`` waits for it.

    Tokens without anything to show for them make no event, unless their log probabilities or ids are asked for. Where
    reasoning is not to be shown, neither are those, because they would tell it.
    """

    def __init__(
        self,
        parser: OutputParser,
        text: TextDecoder,
        envelope: Envelope,
        *,
        body: Mapping[str, Any],
        eos_token_ids: Collection[int] = (),
    ) -> None:
        asked = Options.read(CHAT, body)
        options = replace(asked, logprobs=asked.logprobs if asked.reasoning else None)
        if parser.keeps_special_tokens:
            options = replace(options, skip_special_tokens=False)
        self._cut = Pieces()
        super().__init__(text, options, envelope, eos_token_ids, self._cut)
        logprobs = logprob_format(text, options)
        self._shape = ChatShape(**shape_arguments(envelope, options, logprobs), token_ids=options.reasoning)
        self._verbose = logprobs is not None or (options.token_ids and options.reasoning)
        self._parser = parser
        self._named = isinstance(body.get("tool_choice"), Mapping)
        self._forced = body.get("tool_choice") == "required"
        self._pieces: list[Piece] = []
        self._last = ParsedDelta()
        self._message = ParsedMessage()
        self._called = False
        self._reasoning_tokens: int | None = None
        parser.begin(envelope.prompt_token_ids)

    async def feed(self, items: Sequence[TokenChunk | Finished]) -> list[bytes]:
        """Take the next items; events that are ready to send (none unless ``stream``).

        Raises:
            EngineFailed: the items contradict each other. ParserFailed: the parser is gone, or cannot go on.
        """
        if self.finished or not items:
            return []
        shown = self._answer.feed(items)
        pieces = self._cut.cut(shown, ended=self.finished)
        if self.finished and not self._answer.last_held:
            # The engine's word that it has ended may come after its last token, which was one of many then.
            pieces.append(Piece(""))
        if not self._options.stream:
            self._pieces += pieces
            if self.finished:
                await self._whole()
            return []
        events = self._open(self._shape)
        if not pieces:
            return events
        delta = self._shown(await self._parser.feed(pieces, ended=self.finished))
        if self.finished:
            self._last = delta
            return events
        entries = self._answer.take() if self._verbose else []
        if delta or entries:
            events.append(self._shape.parsed(delta, entries, **self._running_usage()))
        return events

    def finish(self) -> list[bytes]:
        """The last events of a stream: the rest with the finish reason, usage if asked for, the end mark.

        Raises:
            RuntimeError: the answer has not ended; send an error event instead.
        """
        ending = self._ending()
        if self._called and not self._named and ending.finish_reason == FinishReason.STOP.value:
            ending = Ending(CALLED, ending.stop_reason)
        events = self._open(self._shape)
        events.append(self._shape.parsed(self._last, self._answer.take(), ending, **self._running_usage()))
        if self._options.include_usage:
            events.append(self._shape.event([], usage=self.usage()))
        events.append(DONE)
        return events

    def document(self) -> bytes:
        """The answer to a request without ``stream``. Raises RuntimeError as :meth:`finish`."""
        ending = self._ending()
        auto = self._called and not self._named and not self._forced
        if auto or (self._forced and ending.finish_reason == FinishReason.STOP.value):
            ending = Ending(CALLED, ending.stop_reason)
        return self._shape.parsed_document(self._message, self._answer.take(), ending, self.usage())

    def usage(self) -> dict[str, Any]:
        """The ``usage`` member as of now, with what of it was reasoning if the parser counts that."""
        out = super().usage()
        if self._reasoning_tokens is not None:
            out["completion_tokens_details"] = {"reasoning_tokens": self._reasoning_tokens}
        return out

    async def _whole(self) -> None:
        message = await self._parser.whole(self._pieces)
        self._called = bool(message.tool_calls)
        self._reasoning_tokens = message.reasoning_tokens
        self._message = message if self._options.reasoning else replace(message, reasoning=None)

    def _shown(self, delta: ParsedDelta) -> ParsedDelta:
        self._called = self._called or bool(delta.tool_calls)
        if delta.reasoning_tokens is not None:
            self._reasoning_tokens = delta.reasoning_tokens
        return delta if self._options.reasoning else replace(delta, reasoning="")
