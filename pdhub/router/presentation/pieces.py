"""Shown text, cut where tokens end: what a parser of reasoning and tool calls is given."""

from __future__ import annotations

from collections import deque

from pdhub.api.parser import Piece


class Pieces:
    """One answer's text and tokens, side by side.

    A token is given away when all of its text is shown; what a stop string may still cut is not. So the pieces depend
    on the tokens alone, not on how the engine cut its answer.
    """

    def __init__(self) -> None:
        self._ends: deque[tuple[int, int]] = deque()  # tokens, and the characters of the whole text after each
        self._text = ""  # shown, and not given away
        self._given = 0

    def token(self, token_id: int, end: int) -> None:
        """A token came. ``end``: characters of the whole text, shown or not, behind it."""
        self._ends.append((token_id, end))

    def cut(self, shown: str, *, ended: bool) -> list[Piece]:
        """Pieces that are complete now.

        Args:
            shown: text that may be shown since the last call. ended: nothing more comes; every token is given away.
        """
        self._text += shown
        out: list[Piece] = []
        while self._ends and (ended or self._ends[0][1] <= self._given + len(self._text)):
            token_id, end = self._ends.popleft()
            size = min(max(0, end - self._given), len(self._text))
            out.append(Piece(self._text[:size], (token_id,)))
            self._text = self._text[size:]
            self._given += size
        if ended and self._text:
            out.append(Piece(self._text))
            self._text = ""
        return out
