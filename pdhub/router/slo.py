"""Latency targets out of a request's headers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from pdhub.api.request import SLO

TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
MAX_MS = 86_400_000.0
"""A day. Larger targets mean the same, and cannot overflow anything downstream."""

_DECIMAL = re.compile(r"[0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18}", re.ASCII)


def parse_ms(text: str) -> float | None:
    """A positive finite decimal number of milliseconds, clamped; None for anything else."""
    text = text.strip(" \t")
    if not _DECIMAL.fullmatch(text):
        return None
    value = float(text)
    return min(value, MAX_MS) if value > 0 and math.isfinite(value) else None


def read_slo(headers: Mapping[str, str]) -> SLO:
    """Targets of one request.

    Args:
        headers: lower-cased names. The first *present* name of a metric wins: present but invalid means no
            target for that metric, it does not fall through to the next name.
    """
    return SLO(ttft_ms=_first(headers, TTFT_HEADERS), tpot_ms=_first(headers, TPOT_HEADERS))


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    for name in names:
        if name in headers:
            return parse_ms(headers[name])
    return None
