"""The writer's end of tcp: a target, and the channels of the grants that are in use."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pdhub.api import Grant, Peer, TransferFailed, TransferState, WriteOp
from pdhub.transports.posting import Posting
from pdhub.transports.tcp_channel import Channel
from pdhub.transports.tcp_dial import Address
from pdhub.transports.tcp_wire import TOKEN_BYTES, Purpose


class TcpPeer(Peer):
    """A connected target: the channels of the grants that are in use."""

    def __init__(self, address: Address) -> None:
        self._address = address
        sock, _ = address.dial(Purpose.PING, bytes(TOKEN_BYTES))
        sock.close()
        self._lock = threading.Lock()
        self._channels: dict[bytes, Channel] = {}
        self.closed = False

    def prepare(self, grant: Grant) -> None:
        if len(grant.data) == TOKEN_BYTES:
            self.post(Posting(None), grant, ())

    def post(self, posting: Posting, grant: Grant, ops: Sequence[WriteOp]) -> None:
        """Queue a write; it fails at once if the peer was closed."""
        with self._lock:
            if not self.closed:
                channel = self._channels.get(grant.data)
                if channel is None or not channel.post(posting, ops):
                    channel = Channel(self._address, grant, self._gone)
                    self._channels[grant.data] = channel
                    channel.post(posting, ops)
                return
        posting.finish(TransferState.FAILED, TransferFailed("the peer was closed"))

    def _gone(self, channel: Channel) -> None:
        with self._lock:
            if self._channels.get(channel.grant.data) is channel:
                del self._channels[channel.grant.data]

    def close(self) -> None:
        with self._lock:
            self.closed = True
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()
