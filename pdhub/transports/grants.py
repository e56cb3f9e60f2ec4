"""Which grants a writer has open at one target, and who writes with them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

O = TypeVar("O")  # noqa: E741
"""What a target tells of a region that it opens."""


class OpenGrants(Generic[O]):
    """Open grants of one link. For its thread only."""

    def __init__(self) -> None:
        self._opened: dict[bytes, O] = {}
        self._users: dict[bytes, set[Hashable]] = {}
        self._refused: set[bytes] = set()

    def get(self, token: bytes) -> O | None:
        """What the grant opens; None if it is not open."""
        return self._opened.get(token)

    def expect(self, token: bytes) -> None:
        """The target is asked to open it."""
        self._refused.discard(token)

    def opened(self, token: bytes, opened: O) -> None:
        """The target opened it."""
        self._opened[token] = opened

    def refuse(self, token: bytes) -> None:
        """The target did not open it, or what it opened is of no use here."""
        self._refused.add(token)

    def was_refused(self, token: bytes) -> bool:
        """Asked once an answer is there; forgets it."""
        if token in self._refused:
            self._refused.discard(token)
            return True
        return False

    def use(self, token: bytes, user: Hashable) -> None:
        """``user`` writes with this grant: it stays open until every user left, or the target ends it."""
        self._users.setdefault(token, set()).add(user)

    def leave(self, user: Hashable) -> list[bytes]:
        """``user`` writes no more. The grants that nobody else uses are closed; they must be returned."""
        closed = []
        for token in list(self._users):
            self._users[token].discard(user)
            if not self._users[token]:
                del self._users[token]
                if self._opened.pop(token, None) is not None:
                    closed.append(token)
        return closed

    def close(self, token: bytes) -> None:
        """The grant is no longer open."""
        self._opened.pop(token, None)
        self._users.pop(token, None)

    def clear(self) -> list[bytes]:
        """Close everything. The grants that were open."""
        tokens = list(self._opened)
        self._opened.clear()
        self._users.clear()
        return tokens
