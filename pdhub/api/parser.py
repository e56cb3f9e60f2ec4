"""Reasoning and tool-call parsers for engines that speak tokens.

The host detokenises, applies stop strings and counts; a parser says what the text means: which part is reasoning,
which is content, which is a call of a tool. Chat answers only. A parser may live in another process, so its calls are
coroutines; the host waits for each before it takes the next tokens of that answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdhub.api.client import Call
from pdhub.api.operate import Topology


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one token, or of several where one token alone has none to show yet. However the engine cut its
    answer, the host gives the same pieces for the same tokens."""

    text: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one call: ``id`` and ``name`` come once, ``arguments`` concatenate to the whole."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """What some text means. All empty = hold back.

    Args:
        reasoning_tokens: of the answer so far; None = not counted.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = field(default=())
    reasoning_tokens: int | None = None

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One whole call. ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """What a whole answer means. ``content`` is None where the message is to say null.

    Args:
        reasoning_tokens: as in :class:`ParsedDelta`.
    """

    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = field(default=())
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ParseRequest:
    """One answer that is going to be parsed.

    Args:
        body: the client's chat request, read-only.
        stream: whether the client gets deltas; otherwise only :meth:`OutputParser.whole` is called.
        instance: name of the prefill instance that computes the prompt; empty if there is none.
        ask: make a call to that instance, and return its JSON object; None for an instance of ``pdhub node``, which
            answers no other calls than its own. Raises what the host makes of any other status than 200.
    """

    body: Mapping[str, Any]
    stream: bool
    instance: str = ""
    ask: Callable[[Call], Awaitable[Mapping[str, Any]]] | None = None


class OutputParser(ABC):
    """Parses one answer. Concatenated results must not depend on how the pieces were grouped into calls (the kit
    groups them in every way)."""

    #: the text must have the special tokens that the client does not want to see: markers are among them
    keeps_special_tokens: bool = False

    def begin(self, prompt_token_ids: Sequence[int]) -> None:
        """The exact prompt, before the first piece; empty if the prefill instance did not tell it."""

    @abstractmethod
    async def feed(self, pieces: Sequence[Piece], *, ended: bool) -> ParsedDelta:
        """Parse the next pieces of a streamed answer; with ``ended`` they are the last, and there is at least one.

        Raises:
            ParserFailed: the answer cannot be parsed (any more).
        """

    async def whole(self, pieces: Sequence[Piece]) -> ParsedMessage:
        """Parse an answer that is not streamed, all at once. Called once, instead of :meth:`feed`; raises as it.

        Default: what :meth:`feed` makes of it.
        """
        delta = await self.feed(pieces, ended=True)
        calls: dict[int, ToolCall] = {}
        for part in delta.tool_calls:
            known = calls.get(part.index, ToolCall("", "", ""))
            calls[part.index] = ToolCall(part.id or known.id, part.name or known.name, known.arguments + part.arguments)
        content = delta.content or (None if calls or delta.reasoning else "")
        return ParsedMessage(
            content, delta.reasoning or None, tuple(calls[i] for i in sorted(calls)), delta.reasoning_tokens
        )

    def close(self) -> None:
        """Nobody wants the rest. Always called, once, last."""


@dataclass(frozen=True, slots=True)
class ParserContext:
    """What the host gives a parser plugin.

    Args:
        model: the served model's name.
        tokenizer: directory of the model's tokenizer, or its ``tokenizer.json``; None if the configuration has none.
        topology: the whole deployment.
        changed: to be called on the event loop when :attr:`ParserFactory.problem` changes.
    """

    model: str
    tokenizer: str | None
    topology: Topology
    changed: Callable[[], None] = lambda: None


class ParserFactory(ABC):
    """Makes a parser for each answer. One a router."""

    #: why it cannot parse just now; empty = it can. While it is not empty, requests that need it go to pools that speak
    #: for themselves.
    problem: str = ""

    async def start(self) -> None:
        """Once, on the event loop, before anything is opened. Must not wait for what takes long: say so in
        :attr:`problem` meanwhile."""

    async def close(self) -> None:
        """Release everything. Idempotent."""

    def wanted(self, body: Mapping[str, Any]) -> bool:
        """Whether the answer to this chat request must be parsed at all. Default: always."""
        return True

    @abstractmethod
    async def open(self, request: ParseRequest) -> OutputParser:
        """A parser for one answer; before its prompt is computed.

        Raises:
            InvalidRequest: the request cannot be parsed by anybody. Unsupported: only not by this one.
            ParserFailed: it cannot parse just now.
        """
