"""Memory that all processes of a tree share: what is held back, what goes wrong, and what was found wrong."""

from __future__ import annotations

import mmap
import os
import struct
from enum import IntEnum
from pathlib import Path

from pdhub.testing.faults import Faults

LOOK_S = 0.003
"""How often whoever is held looks whether it may go on."""

_RATES = ("delay_s", "reorder", "fail", "drop", "lose", "flip", "duplicate_done", "lying_abort", "late_write")
_NUMBERS = struct.Struct(f"<{len(_RATES) + 2}d")
_AT = 64
_COUNTS_AT = 256
_COUNT = struct.Struct("<Q")
_SIZE = 4096


class Gate(IntEnum):
    """Where a test can hold requests: in front of the join, in front of writes, between two tokens."""

    JOIN = 0
    WRITE = 1
    DECODE = 2


class Count(IntEnum):
    """What the node has done: landings claimed, claimed in memory that an earlier one had, decoded to the end."""

    CLAIMED = 0
    REUSED = 1
    DECODED = 2


class Board:
    """One a tree, in a file that each process maps. What one process sets the others see at once.

    Args:
        path: of the file. Faults that were found go to a file beside it.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(handle, _SIZE)
        self._map = mmap.mmap(handle, _SIZE)
        os.close(handle)

    def shut(self, gate: Gate) -> None:
        self._map[gate] = 1

    def open(self, gate: Gate) -> None:
        self._map[gate] = 0

    def is_shut(self, gate: Gate) -> bool:
        return bool(self._map[gate])

    def arrange(self, faults: Faults, chunk_s: float) -> None:
        """What writes suffer from now on, and how long a chunk takes to compute."""
        vanished = 1.0 if faults.vanish_after is not None else 0.0
        rates = [getattr(faults, name) for name in _RATES]
        _NUMBERS.pack_into(self._map, _AT, *rates, vanished, chunk_s)

    def faults(self) -> Faults:
        *rates, vanished, _ = _NUMBERS.unpack_from(self._map, _AT)
        return Faults(**dict(zip(_RATES, rates, strict=True)), vanish_after=0 if vanished else None)

    def chunk_s(self) -> float:
        return float(_NUMBERS.unpack_from(self._map, _AT)[-1])

    def add(self, count: Count) -> None:
        """One more. For one process."""
        _COUNT.pack_into(self._map, _COUNTS_AT + 8 * count, self.counted(count) + 1)

    def counted(self, count: Count) -> int:
        return int(_COUNT.unpack_from(self._map, _COUNTS_AT + 8 * count)[0])

    def complain(self, text: str) -> None:
        """Something that must never be. It outlives this process."""
        handle = os.open(self._complaints, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(handle, f"{text}\n".encode())
        os.close(handle)

    def complaints(self) -> list[str]:
        """All since the last look."""
        if not self._complaints.exists():
            return []
        found = self._complaints.read_text().splitlines()
        self._complaints.unlink()
        return found

    @property
    def _complaints(self) -> Path:
        return self._path.with_suffix(".wrong")
