"""What chat and completions answers have in common: envelopes, events and usage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec

from pdhub.router.presentation.logprobs import Entry, LogprobFormat

DONE: Final = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer ended. ``stop_reason``: the stop string or stop id, as in vLLM."""

    finish_reason: str
    stop_reason: str | int | None = None


class Shape(ABC):
    """Builds the documents of one answer.

    Args:
        request_id, model, created: the envelope.
        logprobs: how to render log probabilities; None = not asked for.
        prompt_token_ids: given back if token ids were asked for, else None.
        token_ids: give the answer's token ids too. Default: if the prompt's are given.
        service_tier: said in every document if it is not None.
        role: who says it, where that is told.
    """

    chunk: ClassVar[str]
    whole: ClassVar[str]

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        created: int,
        logprobs: LogprobFormat | None,
        prompt_token_ids: Sequence[int] | None,
        token_ids: bool = True,
        service_tier: str | None = None,
        role: str = "assistant",
    ) -> None:
        self._role = role
        self._id = {"id": request_id}
        self._origin: dict[str, Any] = {"created": created, "model": model}
        if service_tier is not None:
            self._origin["service_tier"] = service_tier
        self._logprobs = logprobs
        self._prompt_token_ids = None if prompt_token_ids is None else list(prompt_token_ids)
        self._token_ids = token_ids and prompt_token_ids is not None
        head = _encode({**self._id, "object": self.chunk, **self._origin})[:-1]
        self._head = b"data: " + head + b',"choices":['
        before, after = self._around_text()
        self._before = self._head + before
        self._after = after + b"]}\n\n"

    def plain(self, text: str) -> bytes:
        """The event of some text and nothing else: the hot path."""
        return self._before + _encode(text) + self._after

    def event(self, choices: Sequence[Mapping[str, Any]], **members: Any) -> bytes:
        """An event with these choices and further top-level members."""
        tail = _encode(members)[1:-1]
        body = b",".join([_encode(choice) for choice in choices])
        return self._head + body + (b"]," + tail if tail else b"]") + b"}\n\n"

    def document(self, text: str, entries: Sequence[Entry], ending: Ending, usage: Mapping[str, Any]) -> bytes:
        """The answer to a request without stream."""
        return self._whole(self._message(text), entries, ending, usage)

    def _whole(
        self, said: Mapping[str, Any], entries: Sequence[Entry], ending: Ending, usage: Mapping[str, Any]
    ) -> bytes:
        choice = {"index": 0, **said, **self._rest(entries, ending)}
        members = {**self._id, "object": self.whole, **self._origin, "choices": [choice], "usage": usage}
        self._add_prompt(members, choice)
        return _encode(members)

    def _rest(self, entries: Sequence[Entry], ending: Ending | None) -> dict[str, Any]:
        """The members of a choice behind its text."""
        out: dict[str, Any] = {"logprobs": self._render(entries) if self._logprobs and entries else None}
        out["finish_reason"] = ending.finish_reason if ending else None
        if ending:
            out["stop_reason"] = ending.stop_reason
        if self._token_ids:
            out["token_ids"] = [entry.token_id for entry in entries]
        return out

    @abstractmethod
    def _around_text(self) -> tuple[bytes, bytes]:
        """What stands before and after the text in the choice of a plain event."""

    @abstractmethod
    def first(self, **members: Any) -> bytes | None:
        """The event that opens a stream, if there is one."""

    @abstractmethod
    def delta(self, text: str, entries: Sequence[Entry], ending: Ending | None = None, **members: Any) -> bytes:
        """An event with everything: text, log probabilities, token ids, the end."""

    @abstractmethod
    def _message(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _render(self, entries: Sequence[Entry]) -> dict[str, Any]: ...

    @abstractmethod
    def _add_prompt(self, members: dict[str, Any], choice: dict[str, Any]) -> None:
        """Put the prompt's ids where vLLM puts them, if asked for."""
