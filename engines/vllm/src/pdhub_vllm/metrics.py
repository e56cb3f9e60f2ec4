"""A server's load, read from the text of its ``/metrics``. Names of a signal by version, newest first."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pdhub.api import EngineLoad

SIGNALS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    }
)
"""``kv_cache_usage_perc`` since 0.10, and in every version from 0.26 to 0.33; the other name is kept for forks."""

_LINE: Final = re.compile(
    r"^(" + "|".join(re.escape(name) for names in SIGNALS.values() for name in names) + r")(?:\{[^\n]*\})? +(\S+)",
    re.MULTILINE,
)


def read_load(text: str) -> EngineLoad:
    """Sums over data-parallel ranks (label ``engine``); of ``kv_usage`` the fullest rank's. What is missing is None."""
    values: dict[str, list[float]] = {}
    for name, told in _LINE.findall(text):
        if (value := _number(told)) is not None:
            values.setdefault(name, []).append(value)
    running, waiting, usage = (_first(values, SIGNALS[signal]) for signal in ("running", "waiting", "kv_usage"))
    return EngineLoad(
        running=None if running is None else int(sum(running)),
        waiting=None if waiting is None else int(sum(waiting)),
        kv_usage=None if usage is None else max(usage),
    )


def _first(values: Mapping[str, list[float]], names: tuple[str, ...]) -> list[float] | None:
    return next((values[name] for name in names if name in values), None)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
