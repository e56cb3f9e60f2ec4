"""Reasoning and tool-call parsers for engines that speak tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one call: ``id`` and ``name`` come once, ``arguments`` concatenate to the whole."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """What some text means. All empty = hold back."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = field(default=())


class OutputParser(ABC):
    """Parses one answer. Concatenated results must not depend on how the text was cut (the kit cuts it
    everywhere)."""

    @abstractmethod
    def feed(self, text: str, token_ids: Sequence[int]) -> ParsedDelta:
        """Parse the next piece. Called in order; ``text`` may be empty."""

    @abstractmethod
    def finish(self) -> ParsedDelta:
        """Flush. Called once, last."""


class ParserFactory(ABC):
    """Makes a parser for each answer."""

    @abstractmethod
    def create(self, body: Mapping[str, Any]) -> OutputParser:
        """``body`` is the client's request (``tools``, ``chat_template_kwargs``)."""
