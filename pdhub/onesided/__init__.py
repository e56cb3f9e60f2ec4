"""For plugins of transports whose native library writes one-sided and has no rights of its own.

NIXL, Mooncake and their like move bytes from one process into another's memory by address. They know no grants, no
revocation and no "the landing was given to somebody else". This package adds that, the same for all: grants are
tokens that a control connection opens, and a fence ends with memory that no late byte can damage (see
``docs/adr/0005-onesided-fencing.md``). A plugin implements :class:`Native` and :class:`Route` and returns a
:class:`OneSidedTransport` from its factory. An engine reads a landing, wherever it is, with :func:`region_bytes`.
"""

from pdhub.onesided.native import Native, Piece, Route, Sending, StillUnderWay
from pdhub.onesided.options import OneSidedConfig
from pdhub.onesided.tensors import region_bytes
from pdhub.onesided.transport import OneSidedTransport

__all__ = [
    "Native",
    "OneSidedConfig",
    "OneSidedTransport",
    "Piece",
    "Route",
    "Sending",
    "StillUnderWay",
    "region_bytes",
]
