"""One TransferEngine: the library as an instance of the transport uses it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from pdhub.api import PluginError
from pdhub.onesided import Native, Route
from pdhub_mooncake.codes import meaning
from pdhub_mooncake.library import load
from pdhub_mooncake.route import MooncakeRoute
from pdhub_mooncake.settings import forced

if TYPE_CHECKING:
    from pdhub_mooncake.plugin import MooncakeConfig


class MooncakeNative(Native):
    """See :class:`pdhub.onesided.Native`. The engine's own threads sleep when nothing is moved.

    Peers find each other directly (``P2PHANDSHAKE``), so no metadata server is needed.
    """

    def __init__(self, config: MooncakeConfig) -> None:
        self._config = config
        self._host = config.advertise or config.host
        self.devices = frozenset(config.devices)
        self.remote = config.protocol != "nvlink_intra"
        self._engine: Any = None
        self._registered: set[int] = set()
        self._lock = threading.Lock()

    def open(self) -> None:
        self._engine = self._start()
        self._description = f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def _start(self) -> Any:
        protocol, host = self._config.protocol, self._host
        engine = load()()
        with forced(protocol):
            code = engine.initialize(host, "P2PHANDSHAKE", protocol, ",".join(self._config.network_devices))
        if code:
            raise PluginError(
                f"Mooncake does not start with protocol {protocol} on {host}: {meaning(code)}",
                hint="use protocol tcp where there is no RDMA device; Mooncake's own message is in the log above",
            )
        return engine

    def describe(self) -> bytes:
        return self._description

    def connect(self, description: bytes) -> Route:
        return MooncakeRoute(self._engine, description.decode())

    def register(self, address: int, nbytes: int, device: str) -> object:
        code = self._engine.register_memory(address, nbytes, "*" if device == "cpu" else device)
        if code:
            raise ValueError(f"Mooncake cannot register {nbytes} bytes on {device}: {meaning(code)}")
        with self._lock:
            self._registered.add(address)
        return address

    def describe_memory(self, handle: object) -> bytes:
        return b""  # writers' engines ask for it themselves

    def deregister(self, handle: object) -> None:
        with self._lock:
            if handle not in self._registered:
                return
            self._registered.discard(handle)
        self._engine.unregister_memory(handle)

    def close(self) -> None:
        if self._engine is None:
            return
        for address in list(self._registered):
            self.deregister(address)
        self._engine = None
