"""Registration of the built-in transports. Light: nothing is opened or imported until a factory is called."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field, model_validator

from pdhub.api import PluginConfig, Stability, Transport, TransportSpec, hookimpl


class ShmConfig(PluginConfig):
    """Shared memory on one host."""

    warm_bytes: int = Field(512 << 20, ge=0, description="Freed memory kept for the next landings, in bytes.")
    timeout_s: float = Field(5.0, gt=0, description="Longest wait for the target to open a landing to a writer.")


class TcpConfig(PluginConfig):
    """Plain TCP between any two hosts. Unencrypted: only for a network that you trust."""

    host: str = Field("127.0.0.1", description="Address that a node listens on for writers.")
    port: int = Field(0, ge=0, le=65_535, description="Port to listen on; 0 takes a free one.")
    advertise: str | None = Field(None, description="Address that writers are told; default is `host`.")
    max_connections: int = Field(256, ge=1, description="Connections of writers at once; more are refused.")
    buffer_bytes: int = Field(256 << 10, ge=0, description="Kernel buffers of each socket; 0 = the system's.")
    timeout_s: float = Field(10.0, gt=0, description="A connection that makes no progress for so long has failed.")
    warm_bytes: int = Field(512 << 20, ge=0, description="Freed memory kept for the next landings, in bytes.")

    @model_validator(mode="after")
    def _reachable(self) -> TcpConfig:
        if self.advertise is None and self.host in ("", "0.0.0.0", "::"):
            raise ValueError("`advertise` is needed when `host` is a wildcard: writers must know where to connect")
        return self


def _shm(config: ShmConfig) -> Transport:
    from pdhub.transports.shm import ShmTransport

    return ShmTransport(config)


def _tcp(config: TcpConfig) -> Transport:
    from pdhub.transports.tcp import TcpTransport

    return TcpTransport(config)


@hookimpl
def pdhub_register_transports() -> Iterable[TransportSpec]:
    return [
        TransportSpec(
            name="shm",
            summary="Shared memory on one host: a write is one memory copy",
            config=ShmConfig,
            factory=_shm,
            stability=Stability.BETA,
        ),
        TransportSpec(
            name="tcp",
            summary="Plain TCP between any two hosts, no dependency",
            config=TcpConfig,
            factory=_tcp,
            stability=Stability.BETA,
        ),
    ]
