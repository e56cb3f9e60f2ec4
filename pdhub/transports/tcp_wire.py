"""Messages between the two ends of the tcp transport. All numbers big-endian.

A connection carries one grant::

    writer                                       target
      magic, protocol, purpose, token       ──▶
                                            ◀──  status, nbytes of the region         not OK: it closes
      DATA(offset, length) + bytes          ──▶                                       any number
      END(number)                           ──▶
                                            ◀──  ACK(number)                          every byte before is in place

The target closes the connection when it has stopped reading for good. So the end of its stream, or a reset, proves
to the writer that no byte can land any more.
"""

from __future__ import annotations

import json
import struct
from enum import IntEnum
from typing import Final

from pdhub.api import PeerMetadata, TransferFailed

NAME: Final = "tcp"
PROTOCOL: Final = 1
MAGIC: Final = b"pdhubKV\0"
TOKEN_BYTES: Final = 32

HELLO: Final = struct.Struct(">8sHB32s")
ANSWER: Final = struct.Struct(">BQ")
FRAME: Final = struct.Struct(">BQQ")
"""kind, offset or number, length"""
ACK: Final = struct.Struct(">Q")


class Purpose(IntEnum):
    PING = 0
    WRITE = 1


class Status(IntEnum):
    OK = 0
    PROTOCOL = 1
    UNKNOWN_GRANT = 2


class Kind(IntEnum):
    DATA = 1
    END = 2


def make_metadata(host: str, port: int) -> PeerMetadata:
    return PeerMetadata(NAME, json.dumps({"protocol": PROTOCOL, "host": host, "port": port}).encode())


def read_metadata(peer: PeerMetadata) -> tuple[str, int]:
    """Host and port of the target. Raises TransferFailed if it does not speak our protocol."""
    if peer.transport != NAME:
        raise TransferFailed(f"the target speaks {peer.transport!r}, this side tcp")
    try:
        fields = json.loads(peer.data)
        protocol, host, port = fields["protocol"], str(fields["host"]), int(fields["port"])
    except (ValueError, TypeError, KeyError) as error:
        raise TransferFailed("the target's tcp metadata cannot be read") from error
    if protocol != PROTOCOL:
        raise TransferFailed(f"the target speaks tcp protocol {protocol}, this side {PROTOCOL}")
    return host, port
