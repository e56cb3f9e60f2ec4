"""A token stream with one document a line."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from pdhub.api.client import FrameParser
from pdhub.api.engine import Finished, TokenChunk
from pdhub.api.errors import EngineFailed


class LineParser(FrameParser):
    """Cuts the stream into lines; a subclass reads one at a time. Blank lines are left out."""

    #: bytes; a line is a few tokens, and a longer one is none of this stream
    max_line: int = 4 << 20

    def __init__(self) -> None:
        self._open = bytearray()  # a line whose end has not come

    def feed(self, data: bytes) -> Sequence[TokenChunk | Finished]:
        lines = data.split(b"\n")
        if len(lines) > 1 and self._open:
            lines[0] = bytes(self._open) + lines[0]
            self._open.clear()
        self._open += lines.pop()
        if len(self._open) > self.max_line:
            raise EngineFailed("the node sent a line that is no frame")
        return [item for line in lines if line.strip() for item in self.read(line)]

    @abstractmethod
    def read(self, line: bytes) -> Iterable[TokenChunk | Finished]:
        """Items of one whole line. Raises as :meth:`feed`."""
