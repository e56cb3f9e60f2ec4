"""Registration. Light: the native library is loaded when a transport is opened."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from pdhub.api import Stability, Transport, TransportSpec, hookimpl
from pdhub.onesided.options import OneSidedConfig


class MooncakeConfig(OneSidedConfig):
    """Mooncake's TransferEngine. Its own settings are read from ``MC_*`` of the environment, as always."""

    protocol: Literal["rdma", "tcp", "nvlink", "nvlink_intra"] = Field(
        "rdma",
        description="What moves the bytes. The NVLink ones need a CUDA build; nvlink_intra stays on one host.",
    )
    network_devices: list[str] = Field([], description="RDMA devices to use, such as `mlx5_0`; none means all.")
    piece_bytes: int = Field(16 << 20, ge=4096, description="A write is posted in pieces of so many bytes.")
    pieces_in_flight: int = Field(4, ge=1, description="Pieces posted at once. An abort waits for those.")


def _mooncake(config: MooncakeConfig) -> Transport:
    from pdhub_mooncake.transport import mooncake_transport

    return mooncake_transport(config)


@hookimpl
def pdhub_register_transports() -> Iterable[TransportSpec]:
    return [
        TransportSpec(
            name="mooncake",
            summary="Mooncake TransferEngine: one-sided writes over RDMA, TCP and NVLink; host and CUDA memory",
            config=MooncakeConfig,
            factory=_mooncake,
            stability=Stability.ALPHA,
        )
    ]
