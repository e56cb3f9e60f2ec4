"""Registration. Light: the native library is loaded when a transport is opened."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from pdhub.api import Stability, Transport, TransportSpec, hookimpl
from pdhub.onesided.options import OneSidedConfig


class NixlConfig(OneSidedConfig):
    """NIXL >= 1.5. Which network it takes is the backend's affair: UCX reads ``UCX_TLS`` and ``UCX_NET_DEVICES``."""

    library: Literal["auto", "cu12", "cu13"] = Field("auto", description="Which installed build of NIXL to load.")
    backends: list[str] = Field(
        ["UCX"], min_length=1, description="NIXL backends, such as UCX or LIBFABRIC (EFA); the first able one is used."
    )
    backend_options: dict[str, dict[str, str]] = Field(
        {}, description="Parameters of each backend by its name, such as `UCX: {num_threads: '4'}`."
    )
    wake_ms: int = Field(
        5, ge=1, description="Longest sleep of NIXL's progress thread; it wakes earlier when there is something to do."
    )


def _nixl(config: NixlConfig) -> Transport:
    from pdhub_nixl.transport import nixl_transport

    return nixl_transport(config)


@hookimpl
def pdhub_register_transports() -> Iterable[TransportSpec]:
    return [
        TransportSpec(
            name="nixl",
            summary="NIXL: one-sided writes over UCX, libfabric and others; host and CUDA memory",
            config=NixlConfig,
            factory=_nixl,
            stability=Stability.ALPHA,
        )
    ]
