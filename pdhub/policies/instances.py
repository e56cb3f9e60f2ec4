"""The plugins of one policy, made. What is configured the same as in the policy before it keeps what it learned."""

from __future__ import annotations

from typing import Any

from pdhub.policies.routing import Part


class Instances:
    """Args:
    before: those of the policy that this one replaces. An instance that is taken over serves both: the old one for
        requests that still run under it. Only one of the two may be told how requests ended.
    """

    def __init__(self, before: Instances | None = None) -> None:
        self._left = list(before._made) if before is not None else []
        self._made: list[tuple[Part, Any]] = []

    def make(self, part: Part) -> Any:
        """An instance of the plugin; a weight or a name may differ from before. Raises what its factory raises."""
        same = (n for n, (old, _) in enumerate(self._left) if old.spec is part.spec and old.config == part.config)
        found = next(same, None)
        instance = part.spec.factory(part.config) if found is None else self._left.pop(found)[1]
        self._made.append((part, instance))
        return instance
