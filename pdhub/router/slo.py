"""What a request asks for, counted and, if the policy is strict, refused where it cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pdhub.api.errors import InvalidRequest
from pdhub.core.slo import SloReading, read_slo
from pdhub.core.slo_classes import Classes


def read_asked(
    headers: Mapping[str, str], body: Mapping[str, Any], classes: Classes, count: Callable[[str], None]
) -> SloReading:
    """Args:
        headers: lower-cased names. count: told each name that was present but could not be read.

    Raises:
        InvalidRequest: naming the first of them, if the policy is strict.
    """
    reading = read_slo(headers, body, classes)
    for name in reading.invalid:
        count(name)
    if reading.invalid and classes.strict:
        name = reading.invalid[0]
        raise InvalidRequest(f"{name} cannot be read", param=name)
    return reading
