"""Where each configured value came from, for messages and for ``pdhub config show``."""

from __future__ import annotations

from collections.abc import Sequence

Path = tuple[str | int, ...]
"""A value's place: keys and list indices from the root."""


def dotted(path: Sequence[str | int]) -> str:
    """``pools[0].engine.config.slots``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


class Origins:
    """Path → source: ``FILE:LINE``, ``env NAME`` or ``flag``. A path without one holds its default."""

    def __init__(self) -> None:
        self._sources: dict[Path, str] = {}

    def set(self, path: Path, source: str) -> None:
        """Remember; whatever was known below ``path`` is forgotten, because the value was replaced."""
        for known in [p for p in self._sources if p[: len(path)] == path]:
            del self._sources[known]
        self._sources[path] = source

    def of(self, path: Path) -> str | None:
        """Source of exactly this value."""
        return self._sources.get(path)

    def nearest(self, path: Path) -> str | None:
        """Source of this value or of the closest thing around it: a missing key is reported there."""
        for end in range(len(path), -1, -1):
            if path[:end] in self._sources:
                return self._sources[path[:end]]
        return None

    def where(self, path: Path) -> str:
        """For an error: the path, and the place in the file or the variable that set it."""
        source = self.nearest(path)
        name = dotted(path) or "configuration"
        return f"{name} ({source})" if source else name
