"""What presenting an answer has in common, whether it is parsed or shown as it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdhub.router.presentation.answer import Answer
from pdhub.router.presentation.logprobs import LogprobFormat
from pdhub.router.presentation.options import Options
from pdhub.router.presentation.pieces import Pieces
from pdhub.router.presentation.shape import Ending, Shape
from pdhub.router.presentation.text import TextDecoder


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is said around an answer.

    Args:
        request_id: the answer's ``id``.
        model: the answer's ``model``, as the client named it.
        created: seconds since the epoch.
        prompt_token_ids: the exact prompt. prompt_tokens: its length, where the ids are not known.
        cached_tokens: prompt tokens that the prefill found in its cache; None = unknown, and not said.
        service_tier: the tier that serves it; None = the client did not ask, and it is not said.
    """

    request_id: str
    model: str
    created: int
    prompt_token_ids: Sequence[int]
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    service_tier: str | None = None


class Presentation:
    """One answer.

    Args:
        text: the model's decoder.
        options: what the client's request says of its answer.
        eos_token_ids: ids whose text is never shown when they end the answer.
        pieces: filled with the answer's text in pieces.
    """

    def __init__(
        self,
        text: TextDecoder,
        options: Options,
        envelope: Envelope,
        eos_token_ids: Collection[int],
        pieces: Pieces | None = None,
    ) -> None:
        self._options = options
        self._envelope = envelope
        self._answer = Answer(text, options, envelope.prompt_token_ids, eos_token_ids, pieces)
        self._opened = False

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

    def usage(self) -> dict[str, Any]:
        """The ``usage`` member as of now."""
        envelope = self._envelope
        prompt = len(envelope.prompt_token_ids) or envelope.prompt_tokens
        out: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
        }
        if envelope.cached_tokens is not None:
            out["prompt_tokens_details"] = {"cached_tokens": envelope.cached_tokens}
        return out

    def _ending(self) -> Ending:
        """Raises RuntimeError if there is none yet."""
        if self._answer.ending is None:
            raise RuntimeError("the answer has not ended")
        return self._answer.ending

    def _open(self, shape: Shape) -> list[bytes]:
        if self._opened:
            return []
        self._opened = True
        first = shape.first(**self._running_usage())
        return [] if first is None else [first]

    def _running_usage(self) -> Mapping[str, Any]:
        return {"usage": self.usage()} if self._options.continuous_usage else {}


def shape_arguments(envelope: Envelope, options: Options, logprobs: LogprobFormat | None) -> dict[str, Any]:
    """Of :class:`~pdhub.router.presentation.shape.Shape`."""
    return {
        "request_id": envelope.request_id,
        "model": envelope.model,
        "created": envelope.created,
        "logprobs": logprobs,
        "prompt_token_ids": envelope.prompt_token_ids if options.token_ids else None,
        "service_tier": envelope.service_tier,
        "role": options.role,
    }


def logprob_format(text: TextDecoder, options: Options) -> LogprobFormat | None:
    """How to render log probabilities; None if they are not asked for."""
    if options.logprobs is None:
        return None
    return LogprobFormat(text, options.logprobs, ids_for_text=options.ids_for_text)
