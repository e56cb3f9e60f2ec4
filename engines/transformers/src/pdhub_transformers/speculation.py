"""Prompt lookup: what followed the last few tokens the time before is a good guess of what follows now.

A guess costs nothing to make. It is verified by the model itself: the engine feeds it as extra rows and keeps the
tokens for which the sampler picks the same, so the output is what it would be without.
"""

from __future__ import annotations

from collections.abc import Sequence


class PromptLookup:
    """Tokens of one request, indexed by n-gram.

    Args:
        tokens: prompt and first token.
        ngram_max, ngram_min: lengths looked up, longest first.
        limit: most tokens proposed at once.
    """

    def __init__(self, tokens: Sequence[int], *, ngram_max: int, ngram_min: int, limit: int) -> None:
        self._sizes = tuple(range(ngram_max, ngram_min - 1, -1))
        self._limit = self._width = limit
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram → position of the token that followed it last
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens that are now part of the text."""
        for token in tokens:
            position = len(self._tokens)
            for size in self._sizes:
                if position >= size:
                    self._after[tuple(self._tokens[position - size :])] = position
            self._tokens.append(token)

    def propose(self, most: int) -> list[int]:
        """A guess of at most ``most`` tokens; empty if the last tokens were never seen before."""
        most = min(most, self._width)
        if most < 1:
            return []
        for size in self._sizes:
            found = self._after.get(tuple(self._tokens[-size:])) if len(self._tokens) >= size else None
            if found is not None:
                return self._tokens[found : found + most]
        return []

    def verified(self, proposed: int, accepted: int) -> None:
        """Learn how far guesses hold in this text: a full hit widens the next one, a miss narrows it."""
        if accepted == proposed:
            self._width = min(self._limit, 2 * self._width)
        else:
            self._width = max(1, accepted)
