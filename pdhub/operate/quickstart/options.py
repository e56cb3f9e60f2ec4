"""What the command line may choose."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """Flags of ``pdhub quickstart``.

    Args:
        once: exit with 0 after the table instead of staying up.
        prompt: ask this instead of the three built-in prompts.
        port: the router's port; None takes a free one.
        json: only a JSON list on stdout; everything else goes to stderr.
    """

    once: bool = False
    prompt: str | None = None
    port: int | None = None
    json: bool = False
