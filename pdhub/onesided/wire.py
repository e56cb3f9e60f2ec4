"""Messages of the control connection, between a writer and a target. All numbers big-endian.

::

    writer                       target
      HELLO(instance)        ──▶                    not this instance or protocol: it closes
                             ◀──  WELCOME
      OPEN(token)            ──▶
                             ◀──  OPENED(token, memory, address, nbytes, device + description the first time)
                                  or REFUSED(token)
      … the library writes, no message …
                             ◀──  RECALL(token)     the region was freed
                             ◀──  REVOKED(token)    the region was fenced
      RETURNED(token)        ──▶                    no write of this grant runs, none will start
      LOST(token)            ──▶                    the same, but what the library broke off may still arrive
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from pdhub.api import PeerMetadata, TransferFailed

MAGIC: Final = b"pdhub1s\0"
PROTOCOL: Final = 1
TOKEN_BYTES: Final = 32
MAX_EXTRA: Final = 1 << 20
_HEAD: Final = struct.Struct(">8sHB32sQQQI")


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    OPEN = 3
    OPENED = 4
    REFUSED = 5
    RECALL = 6
    REVOKED = 7
    RETURNED = 8
    LOST = 9


@dataclass(frozen=True, slots=True)
class Message:
    """``memory``: number of the target's memory. ``extra``: of OPENED, the device, a zero byte, the description."""

    kind: Kind
    token: bytes
    memory: int = 0
    address: int = 0
    nbytes: int = 0
    extra: bytes = b""

    def pack(self) -> bytes:
        head = _HEAD.pack(
            MAGIC, PROTOCOL, self.kind, self.token, self.memory, self.address, self.nbytes, len(self.extra)
        )
        return head + self.extra


class Inbox:
    """Cuts what a connection brings into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def take(self, data: bytes) -> Iterator[Message]:
        """The messages that ``data`` completes. Raises ValueError if the stream is none of ours."""
        self._bytes += data
        while len(self._bytes) >= _HEAD.size:
            magic, protocol, kind, token, memory, address, nbytes, extra = _HEAD.unpack_from(self._bytes)
            if magic != MAGIC or protocol != PROTOCOL or extra > MAX_EXTRA:
                raise ValueError("not a control connection of this protocol")
            end = _HEAD.size + extra
            if len(self._bytes) < end:
                return
            tail = bytes(self._bytes[_HEAD.size : end])
            del self._bytes[:end]
            yield Message(Kind(kind), token, memory, address, nbytes, tail)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a target's control connections go, and how its library is reached."""

    host: str
    port: int
    instance: bytes
    native: bytes

    def pack(self, name: str) -> PeerMetadata:
        fields = {
            "protocol": PROTOCOL,
            "host": self.host,
            "port": self.port,
            "instance": self.instance.hex(),
            "native": base64.b64encode(self.native).decode(),
        }
        return PeerMetadata(name, json.dumps(fields).encode())

    @classmethod
    def unpack(cls, name: str, peer: PeerMetadata) -> Address:
        """Raises TransferFailed if it does not speak ``name`` and this protocol."""
        if peer.transport != name:
            raise TransferFailed(f"the target speaks {peer.transport!r}, this side {name}")
        try:
            fields = json.loads(peer.data)
            protocol = fields["protocol"]
            address = cls(
                str(fields["host"]),
                int(fields["port"]),
                bytes.fromhex(fields["instance"]),
                base64.b64decode(fields["native"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise TransferFailed(f"the target's {name} metadata cannot be read") from error
        if protocol != PROTOCOL or len(address.instance) != TOKEN_BYTES:
            raise TransferFailed(f"the target speaks {name} protocol {protocol}, this side {PROTOCOL}")
        return address
