"""What is known of each path of KV: whether an answer over it equals the answer of one server alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

Pair = tuple[str, str]
"""Names of a prefill instance and of a decode node."""


class Verdict(StrEnum):
    """``PENDING``: a check is due or under way. ``UNKNOWN``: it could not be decided, or is not wanted."""

    PENDING = "pending"
    GOOD = "good"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """Args:
    held: requests may not take this path now.
    why: for people.
    """

    verdict: Verdict
    held: bool = False
    why: str = ""


_UNKNOWN = Finding(Verdict.UNKNOWN)


class Pairs:
    """Findings by pair. A pair that was never looked at may be used."""

    def __init__(self) -> None:
        self._found: dict[Pair, Finding] = {}

    def of(self, prefill: str, node: str) -> Finding:
        return self._found.get((prefill, node), _UNKNOWN)

    def held(self, prefill: str, node: str) -> bool:
        """Requests may not take this path now."""
        return self.of(prefill, node).held

    def due(self, pair: Pair) -> None:
        """A check is to come, and nobody may use the pair before it has ended."""
        before = self.of(*pair)
        why = before.why if before.verdict is Verdict.BAD else "its self-check has not ended yet"
        self._found[pair] = Finding(Verdict.PENDING, True, why)

    def good(self, pair: Pair) -> None:
        self._found[pair] = Finding(Verdict.GOOD)

    def bad(self, pair: Pair, why: str) -> None:
        self._found[pair] = Finding(Verdict.BAD, True, why)

    def unknown(self, pair: Pair, why: str) -> None:
        """It may be used, as if there were no checks."""
        self._found[pair] = Finding(Verdict.UNKNOWN, False, why)

    def problems(self) -> Iterator[str]:
        """Of those that are held, for people."""
        for (prefill, node), finding in self._found.items():
            if finding.held:
                yield f"{prefill} → {node}: {finding.why}"

    @property
    def found(self) -> Mapping[Pair, Finding]:
        return MappingProxyType(self._found)
