"""A server's load: from the text of its ``/metrics`` (names of a signal by version, newest first), from ``/load``, or
from the header of an answer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from pdhub.api import EngineLoad

SIGNALS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    }
)
"""``kv_cache_usage_perc`` since 0.10, and in every version from 0.26 to 0.33; the other name is kept for forks."""

EXPIRED: Final = "vllm:nixl_num_kv_expired_reqs"
"""A counter of NIXL's: prompts whose KV was given up because nobody fetched it within its lease."""

_NAMES: Final = (*(name for names in SIGNALS.values() for name in names), f"{EXPIRED}_total")
_LINE: Final = re.compile(
    r"^(" + "|".join(map(re.escape, _NAMES)) + r")(?:\{[^\n]*\})? +(\S+)",
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
        expired=int(sum(values[_NAMES[-1]])) if _NAMES[-1] in values else None,
    )


def read_server_load(info: Mapping[str, Any]) -> EngineLoad:
    """Of ``/load``: requests that the server has, whether they run or wait. Where it does not track them it says 0 all
    the same; what is no count is unknown."""
    told = info.get("server_load")
    return EngineLoad(running=told if isinstance(told, int) and told >= 0 else None)


_ORCA: Final = re.compile(r"(?:named_metrics\.)?(kv_cache_usage_perc|num_requests_waiting)=([^,\s]+)")


def read_orca(headers: Mapping[str, str]) -> EngineLoad | None:
    """Of ``endpoint-load-metrics: TEXT named_metrics.kv_cache_usage_perc=0.4, …``; None if it is not there."""
    told = dict(_ORCA.findall(headers.get("endpoint-load-metrics", "")))
    usage = _number(told.get("kv_cache_usage_perc", ""))
    waiting = _number(told.get("num_requests_waiting", ""))
    if usage is None and waiting is None:
        return None
    return EngineLoad(waiting=None if waiting is None else int(waiting), kv_usage=usage)


def _first(values: Mapping[str, list[float]], names: tuple[str, ...]) -> list[float] | None:
    return next((values[name] for name in names if name in values), None)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
