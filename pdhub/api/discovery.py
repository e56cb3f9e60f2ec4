"""Membership of a pool as events. The built-in source is ``static``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Member:
    """One node as a source sees it; ``url`` is scheme://host:port."""

    name: str
    url: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Membership:
    """The whole membership at one moment: events replace, so a missed one heals itself."""

    members: tuple[Member, ...]


class Discovery(ABC):
    """One a pool."""

    @abstractmethod
    def watch(self) -> AsyncIterator[Membership]:
        """Yield the membership at once, then on each change; re-list after a lost connection, never end."""
