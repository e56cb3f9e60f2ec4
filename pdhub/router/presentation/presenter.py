"""Presents one answer of a token-speaking engine as OpenAI events or as one document."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pdhub.api.engine import Finished, TokenChunk
from pdhub.router.presentation.base import Envelope, Presentation, logprob_format, shape_arguments
from pdhub.router.presentation.chat import ChatShape
from pdhub.router.presentation.completions import CompletionsShape
from pdhub.router.presentation.options import CHAT, Options
from pdhub.router.presentation.shape import DONE
from pdhub.router.presentation.text import TextDecoder


class Presenter(Presentation):
    """One answer. Feed it items as they come; then ``finish()`` of a stream, ``document()`` otherwise.

    Args:
        text: the model's decoder.
        envelope: what is said around the answer.
        endpoint: ``/v1/chat/completions`` or ``/v1/completions``.
        body: the client's parsed request.
        eos_token_ids: ids whose text is never shown when they end the answer.

    Raises:
        InvalidRequest: a member of ``body`` that shapes the answer has a wrong type or value.
    """

    def __init__(
        self,
        text: TextDecoder,
        envelope: Envelope,
        *,
        endpoint: str,
        body: Mapping[str, Any],
        eos_token_ids: Collection[int] = (),
    ) -> None:
        options = Options.read(endpoint, body)
        super().__init__(text, options, envelope, eos_token_ids)
        logprobs = logprob_format(text, options)
        kind = ChatShape if endpoint == CHAT else CompletionsShape
        self._shape = kind(**shape_arguments(envelope, options, logprobs))
        self._plain = logprobs is None and not options.token_ids and not options.continuous_usage
        self._texts: list[str] = []

    def feed(self, items: Sequence[TokenChunk | Finished]) -> list[bytes]:
        """Take the next items; events that are ready to send (none unless ``stream``).

        Raises:
            EngineFailed: the items contradict each other; nothing of them was presented.
        """
        if self.finished or not items:
            return []
        text = self._answer.feed(items)
        if not self._options.stream or self.finished:
            self._texts.append(text)
            return []
        events = self._open(self._shape)
        if text and self._plain:
            events.append(self._shape.plain(text))
        elif text:
            events.append(self._shape.delta(text, self._answer.take(), **self._running_usage()))
        return events

    def finish(self) -> list[bytes]:
        """The last events of a stream: the rest of the text with the finish reason, usage if asked for, the end mark.

        Raises:
            RuntimeError: the answer has not ended, so there is no finish reason; send an error event instead.
        """
        ending = self._ending()
        events = self._open(self._shape)
        rest = "".join(self._texts)
        events.append(self._shape.delta(rest, self._answer.take(), ending, **self._running_usage()))
        if self._options.include_usage:
            events.append(self._shape.event([], usage=self.usage()))
        events.append(DONE)
        return events

    def document(self) -> bytes:
        """The answer to a request without ``stream``. Raises RuntimeError as :meth:`finish`."""
        ending = self._ending()
        return self._shape.document("".join(self._texts), self._answer.take(), ending, self.usage())
