"""Single values that clients send, read without trust."""

from __future__ import annotations

import math
import re
from typing import Any, Final

MAX_MS: Final = 86_400_000.0
"""A day. Larger targets mean the same, and cannot overflow anything downstream."""
MIN_MS: Final = 0.001
"""A microsecond: nothing is faster, and ratios to it stay finite."""
MAX_PRIORITY: Final = 1000

_DECIMAL = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9._:/@+=-]{1,128}", re.ASCII)


def parse_ms(text: str) -> float | None:
    """A positive finite decimal number of milliseconds, clamped; None for anything else: signs, exponents, ``nan``,
    ``inf``, units, digits of other scripts, two values in one."""
    text = text.strip(" \t")
    value = float(text) if _DECIMAL.fullmatch(text) else 0.0
    return max(MIN_MS, min(value, MAX_MS)) if value > 0 else None


def milliseconds(value: Any) -> float | None:
    """The same for a JSON value: a number, or a text as in a header."""
    if isinstance(value, str):
        return parse_ms(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return None  # NaN is not above 0 either
    return float(max(MIN_MS, min(value, MAX_MS)))  # clamped first: a huge integer is no float


def integer(value: Any) -> int | None:
    """A whole number, clamped to ±1000; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return max(-MAX_PRIORITY, min(value, MAX_PRIORITY))


def clean(text: str) -> str | None:
    """A short name that is safe in logs and labels; None for anything else."""
    text = text.strip(" \t")
    return text if _NAME.fullmatch(text) else None
