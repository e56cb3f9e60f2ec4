"""Where in a prompt's tokens its text blocks end, learned from prompts whose tokens were told.

Engines speak of tokens, and the router knows a prompt's text. When prefill has told the tokens of a prompt, each digest
of its text's beginnings is given a mark: the digest of the token blocks up to about the same place. The next prompt
that begins with the same text has the same tokens there, and its marks say where to look for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from pdhub.core.blocks import chain

ENTRIES: Final = 65_536
"""Marks kept, the latest used; about 200 bytes each."""

CAUTION: Final = 7 / 8
"""Tokens are not spread evenly over a text. A mark must not lie behind the place that it stands for, where two prompts
with this beginning already differ; a little before it does no harm."""


class Marks:
    """Args:
    entries: marks kept.
    """

    def __init__(self, entries: int = ENTRIES) -> None:
        self._entries = entries
        self._marks: OrderedDict[tuple[int, int], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._marks)

    def learn(self, prefix: Sequence[int], share: float, token_ids: Sequence[int], block_tokens: int) -> None:
        """The tokens of a prompt.

        Args:
            prefix: digests of its text's beginnings, one a text block, shortest first.
            share: of the text, the part that one text block is.
            block_tokens: size of the blocks that engines speak of.
        """
        digests = chain(token_ids[: int(len(token_ids) * share * len(prefix)) + 1], block_tokens)
        for i in range(len(prefix) - 1, -1, -1):  # the shortest end up as the latest used: many prompts share them
            blocks = int(len(token_ids) * share * (i + 1) * CAUTION) // block_tokens
            if 0 < blocks <= len(digests):
                key = (block_tokens, prefix[i])
                self._marks[key] = digests[blocks - 1]
                self._marks.move_to_end(key)
        while len(self._marks) > self._entries:
            self._marks.popitem(last=False)

    def of(self, prefix: Sequence[int], block_tokens: int) -> list[int]:
        """Token digests of the leading text blocks that are known. Empty: nothing is known of this prompt."""
        found = []
        for digest in prefix:
            mark = self._marks.get((block_tokens, digest))
            if mark is None:
                break
            found.append(mark)
        return found
