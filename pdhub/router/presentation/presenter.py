"""Presents one answer of a token-speaking engine as OpenAI events or as one document."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pdhub.api.engine import Finished, TokenChunk
from pdhub.router.presentation.answer import Answer
from pdhub.router.presentation.chat import ChatShape
from pdhub.router.presentation.completions import CompletionsShape
from pdhub.router.presentation.logprobs import LogprobFormat
from pdhub.router.presentation.options import CHAT, Options
from pdhub.router.presentation.shape import DONE
from pdhub.router.presentation.text import TextDecoder


class Presenter:
    """One answer. Feed it items as they come; then ``finish()`` of a stream, ``document()`` otherwise.

    Args:
        text: the model's decoder.
        endpoint: ``/v1/chat/completions`` or ``/v1/completions``.
        body: the client's parsed request.
        request_id: the answer's ``id``.
        model: the answer's ``model``, as the client named it.
        created: seconds since the epoch.
        prompt_token_ids: the exact prompt. prompt_tokens: its length, where the ids are not known.
        cached_tokens: prompt tokens that the prefill found in its cache; None = unknown, and not said.
        eos_token_ids: ids whose text is never shown when they end the answer.
        service_tier: the tier that serves it; None = the client did not ask, and it is not said.

    Raises:
        InvalidRequest: a member of ``body`` that shapes the answer has a wrong type or value.
    """

    def __init__(
        self,
        text: TextDecoder,
        *,
        endpoint: str,
        body: Mapping[str, Any],
        request_id: str,
        model: str,
        created: int,
        prompt_token_ids: Sequence[int],
        cached_tokens: int | None = None,
        eos_token_ids: Collection[int] = (),
        service_tier: str | None = None,
        prompt_tokens: int = 0,
    ) -> None:
        options = Options.read(endpoint, body)
        logprobs = None
        if options.logprobs is not None:
            logprobs = LogprobFormat(text, options.logprobs, ids_for_text=options.ids_for_text)
        self._options = options
        self._answer = Answer(text, options, prompt_token_ids, eos_token_ids)
        self._shape = (ChatShape if endpoint == CHAT else CompletionsShape)(
            request_id=request_id,
            model=model,
            created=created,
            logprobs=logprobs,
            prompt_token_ids=prompt_token_ids if options.token_ids else None,
            service_tier=service_tier,
        )
        self._plain = logprobs is None and not options.token_ids and not options.continuous_usage
        self._prompt_tokens = len(prompt_token_ids) or prompt_tokens
        self._cached_tokens = cached_tokens
        self._opened = False
        self._pieces: list[str] = []

    @property
    def stream(self) -> bool:
        """The client wants server-sent events."""
        return self._options.stream

    @property
    def stopped(self) -> bool:
        """A stop string matched: the host must cancel the engine now."""
        return self._answer.stopped

    @property
    def finished(self) -> bool:
        """The answer ended, by a stop string or by the engine's word; more items change nothing."""
        return self._answer.ending is not None

    @property
    def completion_tokens(self) -> int:
        """Tokens so far, up to and including the one that ended the answer."""
        return self._answer.count

    def feed(self, items: Sequence[TokenChunk | Finished]) -> list[bytes]:
        """Take the next items; events that are ready to send (none unless ``stream``).

        Raises:
            EngineFailed: the items contradict each other; nothing of them was presented.
        """
        if self.finished or not items:
            return []
        text = self._answer.feed(items)
        if not self._options.stream or self.finished:
            self._pieces.append(text)
            return []
        events = self._open()
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
        ending = self._answer.ending
        if ending is None:
            raise RuntimeError("the answer has not ended")
        events = self._open()
        rest = "".join(self._pieces)
        events.append(self._shape.delta(rest, self._answer.take(), ending, **self._running_usage()))
        if self._options.include_usage:
            events.append(self._shape.event([], usage=self.usage()))
        events.append(DONE)
        return events

    def document(self) -> bytes:
        """The answer to a request without ``stream``. Raises RuntimeError as :meth:`finish`."""
        if self._answer.ending is None:
            raise RuntimeError("the answer has not ended")
        return self._shape.document("".join(self._pieces), self._answer.take(), self._answer.ending, self.usage())

    def usage(self) -> dict[str, Any]:
        """The ``usage`` member as of now."""
        out: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self._prompt_tokens + self.completion_tokens,
        }
        if self._cached_tokens is not None:
            out["prompt_tokens_details"] = {"cached_tokens": self._cached_tokens}
        return out

    def _open(self) -> list[bytes]:
        if self._opened:
            return []
        self._opened = True
        first = self._shape.first(**self._running_usage())
        return [] if first is None else [first]

    def _running_usage(self) -> dict[str, Any]:
        return {"usage": self.usage()} if self._options.continuous_usage else {}
