"""Control channel between a sender (prefill side) and a node: length-framed msgpack over TCP.

A frame is a 4-byte big-endian length and one msgpack map whose member ``t`` is the type. One connection
serves one sender process and many transfers; when it ends, every writer that joined over it is *vanished*.

::

    sender                                   node
      Hello(protocol, layout, rank)    ──▶
                                       ◀──   Welcome(node, transport metadata)   or Refused
      Join(transfer_id, generation)    ──▶
                                       ◀──   Accept(grant, capacity)             or Refused
      … one-sided writes …
      Done(bytes, digest)              ──▶
      Leave(reason)                    ──▶                                       (instead of Done)
                                       ◀──   Revoke(transfer_id)                 stop writing, then Leave
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

PROTOCOL: Final = 1
"""Raised when a message changes its meaning; both sides must be equal."""

MAX_FRAME: Final = 1 << 20
"""Bytes. Control messages are small; anything larger is not one of ours."""

_HEADER = struct.Struct(">I")


class Message(msgspec.Struct, frozen=True, tag_field="t", tag=str.lower):
    """Base of all control messages."""


class Hello(Message, frozen=True):
    """First frame of a sender. ``fingerprint`` is of the layout that it will write."""

    protocol: int
    version: str
    sender: str
    transport: str
    fingerprint: str


class Welcome(Message, frozen=True):
    """The node's answer: how to reach its transport."""

    node: str
    version: str
    transport: str
    metadata: bytes


class Join(Message, frozen=True):
    """Ask to write into a landing.

    ``rank`` of ``writers``: shard number and how many writers the landing waits for.
    ``tokens``: exact prompt tokens that will be written.
    """

    transfer_id: str
    generation: int
    rank: int
    writers: int
    tokens: int


class Accept(Message, frozen=True):
    """The right to write. ``capacity_tokens`` fixes the block offsets; ``grant`` is the transport's."""

    transfer_id: str
    generation: int
    capacity_tokens: int
    region_id: str
    nbytes: int
    grant: bytes


class Refused(Message, frozen=True):
    """No. ``code`` is an error code of :mod:`pdhub.api.errors` or one of :class:`RefusedCode`.

    ``transfer_id`` is empty when the hello was refused (the connection then closes).
    ``need`` repeats the tokens asked for when the landing is too small.
    """

    transfer_id: str
    code: str
    message: str
    need: int = 0


class Done(Message, frozen=True):
    """Every byte of this writer is visible at the target. ``digest`` is set in verify mode (hex)."""

    transfer_id: str
    generation: int
    rank: int
    nbytes: int
    digest: str = ""


class Leave(Message, frozen=True):
    """This writer stopped for good and will write no byte more (``stopped`` False: it cannot prove that)."""

    transfer_id: str
    generation: int
    rank: int
    reason: str
    stopped: bool = True


class Revoke(Message, frozen=True):
    """The lease ended: stop writing and leave."""

    transfer_id: str
    generation: int
    reason: str


class RefusedCode:
    """Codes of :class:`Refused` that are no request errors of their own."""

    PROTOCOL = "protocol_mismatch"
    TRANSPORT = "transport_mismatch"
    LAYOUT = "layout_mismatch"
    UNKNOWN = "unknown_transfer"
    STALE = "stale_generation"
    TOO_SMALL = "landing_too_small"
    CONTEXT = "context_length_exceeded"
    DRAINING = "draining"


ControlMessage = Hello | Welcome | Join | Accept | Refused | Done | Leave | Revoke

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)


class FrameError(ValueError):
    """The bytes are no control frame; the connection must be closed."""


def encode(message: ControlMessage) -> bytes:
    """One frame, header included."""
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


class Decoder:
    """Frames out of a byte stream, whatever the chunking."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[ControlMessage]:
        """Messages completed by ``data``. Raises FrameError for anything that is not ours."""
        self._buffer += data
        out: list[ControlMessage] = []
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise FrameError(f"control frame of {length} bytes; at most {MAX_FRAME} are allowed")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            try:
                out.append(_decoder.decode(bytes(self._buffer[_HEADER.size : end])))
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise FrameError(f"not a control message: {error}") from error
            del self._buffer[:end]
        return out
