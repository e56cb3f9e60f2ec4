"""One line of ``pdhub plugins``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """``BROKEN`` did not load, is incompatible or breaks the contract; ``BLOCKED`` was not loaded on purpose."""

    OK = "ok"
    BROKEN = "broken"
    BLOCKED = "blocked"


@dataclass(frozen=True, slots=True)
class PluginRow:
    """What is known of one spec, or of one plugin that gave none.

    Args:
        kind: the spec's kind (a policy's part for filters and scorers); ``plugin`` if nothing could be read.
        name: the spec's name, or the entry point's.
        distribution, version: of the installed package; empty if it was registered by hand.
        error: why it is broken or blocked; empty if it works.
    """

    kind: str
    name: str
    distribution: str
    version: str
    stability: str
    status: Status
    summary: str = ""
    error: str = ""
