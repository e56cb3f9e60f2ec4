"""Messages between the two ends of the shm transport, one a packet of a SOCK_SEQPACKET Unix socket.

::

    writer                       target
      OPEN(token)            ──▶
                             ◀──  OPENED(token, segment, mapped, nbytes) + descriptor the first time  or REFUSED(token)
      … copies, no message …
                             ◀──  RECALL(token)     the region was freed
      RETURNED(token)        ──▶                    no copy of this grant runs, none will start
                             ◀──  REVOKED(token)    the region was fenced
                             ◀──  FORGET(segment)   unmap it, it is never used again
"""

from __future__ import annotations

import json
import struct
from enum import IntEnum
from pathlib import Path
from typing import Final

from pdhub.api import PeerMetadata, TransferFailed

NAME: Final = "shm"
PROTOCOL: Final = 1
TOKEN_BYTES: Final = 16
_PACKET = struct.Struct("<B16sQQQ")
PACKET_BYTES: Final = _PACKET.size


class Kind(IntEnum):
    OPEN = 1
    OPENED = 2
    REFUSED = 3
    RECALL = 4
    RETURNED = 5
    REVOKED = 6
    FORGET = 7


def pack(kind: Kind, token: bytes = b"", segment: int = 0, mapped: int = 0, nbytes: int = 0) -> bytes:
    """``mapped``: bytes of the whole memory; ``nbytes``: of the region at its start."""
    return _PACKET.pack(kind, token, segment, mapped, nbytes)


def unpack(packet: bytes) -> tuple[Kind, bytes, int, int, int]:
    """Raises ValueError if it is none of ours."""
    if len(packet) != PACKET_BYTES:
        raise ValueError(f"packet of {len(packet)} bytes")
    kind, token, segment, mapped, nbytes = _PACKET.unpack(packet)
    return Kind(kind), token, segment, mapped, nbytes


def boot_id() -> str:
    """Names this boot of this kernel: equal on both sides exactly if memory can be shared."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def make_metadata(address: str) -> PeerMetadata:
    return PeerMetadata(
        NAME, json.dumps({"protocol": PROTOCOL, "boot": boot_id(), "socket": address.lstrip("\0")}).encode()
    )


def read_metadata(peer: PeerMetadata) -> str:
    """The target's socket address. Raises TransferFailed if this process cannot reach it."""
    if peer.transport != NAME:
        raise TransferFailed(f"the target speaks {peer.transport!r}, this side shm")
    try:
        fields = json.loads(peer.data)
        protocol, boot, socket = fields["protocol"], fields["boot"], str(fields["socket"])
    except (ValueError, TypeError, KeyError) as error:
        raise TransferFailed("the target's shm metadata cannot be read") from error
    if protocol != PROTOCOL:
        raise TransferFailed(f"the target speaks shm protocol {protocol}, this side {PROTOCOL}")
    if boot != boot_id():
        raise TransferFailed("shm needs both sides on one host", hint="use the tcp transport between hosts")
    return "\0" + socket
