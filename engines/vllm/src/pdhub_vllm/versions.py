"""Versions of vLLM that this plugin knows."""

from __future__ import annotations

from typing import Final

CHECKED: Final = ("0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32", "0.33")
"""Those whose wheels have been read by ``contract.py``: every field, flag and name that this plugin uses is there."""
