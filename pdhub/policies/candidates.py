"""The explanation of a decision, made when somebody reads it: most decisions are never explained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

from pdhub.api.policy import Candidate


class Candidates(Sequence[Candidate]):
    """Candidates in order of pool and node, made at the first look. Equal to any sequence of the same content.

    Args:
        make: gives all of them in any order, each time the same; must depend on nothing that changes.
    """

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], Iterable[Candidate]]) -> None:
        self._make: Callable[[], Iterable[Candidate]] | None = make
        self._made: tuple[Candidate, ...] = ()

    def _all(self) -> tuple[Candidate, ...]:
        # The decision log reads in a thread of its own: two readers at once may both make them, and both are right.
        make = self._make
        if make is not None:
            self._made = tuple(sorted(make(), key=_place))
            self._make = None
        return self._made

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return self._all() == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # as a sequence of mappings has none

    def __repr__(self) -> str:
        return f"Candidates({list(self._all())!r})"


def _place(candidate: Candidate) -> tuple[str, str]:
    return candidate.pool, candidate.node
