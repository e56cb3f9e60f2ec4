"""Which distribution provides a plugin that is not installed: known names only, to make an error useful."""

from __future__ import annotations

from typing import Final

KNOWN_PROVIDERS: Final = {
    "vllm": "pdhub-vllm",
    "tilert": "pdhub-tilert",
    "tilert-node": "pdhub-tilert",
    "transformers": "pdhub-transformers",
    "nixl": "pdhub-nixl",
    "mooncake": "pdhub-mooncake",
}

KNOWN_KINDS: Final = {
    "engine": ("vllm", "tilert", "tilert-node", "transformers"),
    "transport": ("nixl", "mooncake"),
    "command": ("vllm", "tilert", "transformers"),
    "parser": ("vllm",),
}
"""Those names by kind: a misspelt engine is never said to be a transport."""

BUILTIN_COMMANDS: Final = frozenset(
    {
        "plugins",
        "check",
        "config",
        "node",
        "router",
        "up",
        "quickstart",
        "new",
        "doctor",
        "explain",
        "simulate",
        "calibrate",
        "handoff-bench",
        "bench",
        "help",
    }
)
"""Verbs of ``pdhub`` itself; a plugin's command group cannot have one of these names."""
