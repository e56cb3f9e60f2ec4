"""What Mooncake's numbers mean."""

from __future__ import annotations

MEANING = {
    -1: "invalid argument",
    -2: "too many requests",
    -3: "address not registered",
    -4: "batch busy",
    -6: "device not found",
    -7: "address overlaps a registered one",
    -101: "host name not found",
    -102: "socket error",
    -103: "malformed metadata",
    -104: "handshake refused",
    -200: "metadata error",
    -201: "endpoint error",
    -202: "device context error",
    -300: "NUMA error",
    -301: "clock error",
    -302: "out of memory",
    -303: "not implemented",
}


def meaning(code: int) -> str:
    """For messages: the words and the number."""
    return f"{MEANING.get(code, 'error')} ({code})"
