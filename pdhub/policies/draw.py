"""Chance that is part of the request: numbers drawn from its id.

A request is chosen for more than once (before it waits, after it waited, in a retry, in explain). Numbers from its
id are the same every time, so that the second look does not contradict the first; across requests they are uniform.
Nothing here depends on the process, so that a run can be repeated.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from zlib import crc32

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def seed_of(text: str) -> int:
    """64 well-mixed bits of a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(seed: int, name: str) -> int:
    """64 bits of a seed and a name; cheap, for ties between nodes and for highest-random-weight choice."""
    return ((_bits(name) ^ seed) * _GOLDEN) & _MASK


@lru_cache(maxsize=16_384)
def _bits(name: str) -> int:
    return crc32(name.encode()) * _GOLDEN & _MASK


def unit(bits: int) -> float:
    """64 bits as a number above 0 and below 1."""
    return ((bits >> 11) + 0.5) / (1 << 53)
