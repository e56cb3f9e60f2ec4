"""The factory behind the plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdhub.onesided import OneSidedTransport
from pdhub_nixl.agent import NixlNative

if TYPE_CHECKING:
    from pdhub_nixl.plugin import NixlConfig

FENCES_BY = (
    "it is deregistered, which ends RDMA in the hardware, and other pages are put under its addresses, "
    "where the copies of other mechanisms then go"
)


def nixl_transport(config: NixlConfig) -> OneSidedTransport:
    return OneSidedTransport("nixl", NixlNative(config), config, FENCES_BY)
