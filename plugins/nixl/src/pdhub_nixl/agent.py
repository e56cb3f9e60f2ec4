"""One NIXL agent: the library as an instance of the transport uses it."""

from __future__ import annotations

import secrets
import threading
from typing import TYPE_CHECKING, Any

from pdhub.api import PluginError, TransferFailed
from pdhub.onesided import Native, Route
from pdhub_nixl.devices import segment
from pdhub_nixl.library import load
from pdhub_nixl.route import NixlRoute

if TYPE_CHECKING:
    from pdhub_nixl.plugin import NixlConfig


class NixlNative(Native):
    """See :class:`pdhub.onesided.Native`. The agent's own progress thread sleeps on the backend's events."""

    def __init__(self, config: NixlConfig) -> None:
        self._config = config
        self.devices = frozenset(config.devices)
        self._agent: Any = None
        self._backends: list[int] = []
        self._registered: dict[int, Any] = {}
        self._routes: list[NixlRoute] = []
        self._lock = threading.Lock()

    def open(self) -> None:
        self._nixl = nixl = load(self._config.library)
        self._errors = tuple(
            kind for kind in vars(nixl).values() if isinstance(kind, type) and issubclass(kind, Exception)
        )
        agent_config = nixl.nixlAgentConfig()
        agent_config.useProgThread = True
        agent_config.useListenThread = False
        agent_config.pthrDelay = 1000 * self._config.wake_ms
        agent_config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        self._agent = nixl.nixlAgent(f"pdhub-{secrets.token_hex(12)}", agent_config)
        self._backends = [self._backend(name) for name in self._config.backends]
        self._description = bytes(self._agent.getLocalPartialMD(nixl.nixlRegDList(nixl.DRAM_SEG), True, self._backends))

    def _backend(self, name: str) -> int:
        available = self._agent.getAvailPlugins()
        if name not in available:
            raise PluginError(
                f"NIXL has no backend {name!r} here",
                hint=f"set `backends` to some of {', '.join(sorted(available))}",
            )
        try:
            backend: int = self._agent.createBackend(name, self._config.backend_options.get(name, {}))
        except self._errors as error:
            raise PluginError(
                f"NIXL's backend {name} does not start: {error}", hint="see NIXL_LOG_LEVEL=DEBUG"
            ) from error
        return backend

    def describe(self) -> bytes:
        return self._description

    def connect(self, description: bytes) -> Route:
        try:
            agent = self._agent.loadRemoteMD(description)
        except self._errors as error:
            raise TransferFailed(f"NIXL does not understand the target: {error}") from error
        route = NixlRoute(self._nixl, self._agent, self._errors, self._backends, agent.decode())
        with self._lock:
            self._routes.append(route)
        return route

    def register(self, address: int, nbytes: int, device: str) -> object:
        kind, number = segment(self._nixl, device)
        memory = self._nixl.nixlRegDList(kind, [(address, nbytes, number, "")])
        try:
            self._agent.registerMem(memory, self._backends)
        except self._errors as error:
            raise ValueError(f"NIXL cannot register {nbytes} bytes on {device}: {error}") from error
        with self._lock:
            self._registered[id(memory)] = memory
        return memory

    def describe_memory(self, handle: object) -> bytes:
        return bytes(self._agent.getLocalPartialMD(handle, False, self._backends))

    def deregister(self, handle: object) -> None:
        with self._lock:
            memory = self._registered.pop(id(handle), None)
        if memory is not None:
            self._agent.deregisterMem(memory, self._backends)

    def close(self) -> None:
        if self._agent is None:
            return
        for route in self._routes:
            route.close()
        self._routes.clear()
        for memory in list(self._registered.values()):
            self.deregister(memory)
        self._agent = None
