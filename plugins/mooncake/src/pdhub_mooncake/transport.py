"""The factory behind the plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdhub.onesided import OneSidedTransport
from pdhub_mooncake.engine import MooncakeNative

if TYPE_CHECKING:
    from pdhub_mooncake.plugin import MooncakeConfig

FENCES_BY = (
    "it is unregistered, which ends RDMA in the hardware and makes the engine refuse new requests over tcp, "
    "and other pages are put under its addresses, where a request that is being received then goes"
)


def mooncake_transport(config: MooncakeConfig) -> OneSidedTransport:
    return OneSidedTransport("mooncake", MooncakeNative(config), config, FENCES_BY)
