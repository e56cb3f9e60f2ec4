"""Options that every one-sided transport has."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pdhub.api import PluginConfig


class OneSidedConfig(PluginConfig):
    """Subclass it and add the library's own options."""

    host: str = Field("127.0.0.1", description="Address that a node listens on for writers' control connections.")
    port: int = Field(0, ge=0, le=65_535, description="Port of the control connections; 0 takes a free one.")
    advertise: str | None = Field(None, description="Address that writers are told; default is `host`.")
    devices: list[Literal["cpu", "cuda"]] = Field(["cpu"], min_length=1, description="Kinds of memory to move.")
    max_writers: int = Field(256, ge=1, description="Control connections of writers at once; more are refused.")
    timeout_s: float = Field(10.0, gt=0, description="Longest wait for a target to answer on the control connection.")
    warm_bytes: int = Field(512 << 20, ge=0, description="Freed, registered host memory kept for the next landings.")
    device_warm_bytes: int = Field(
        4 << 30, ge=0, description="Freed, registered device memory kept for the next landings."
    )
    aside_bytes: int = Field(
        4 << 30,
        ge=0,
        description="Device memory that lost writers may keep; beyond it a fence is not proven and the node restarts.",
    )
    piece_bytes: int = Field(64 << 20, ge=4096, description="A write is posted in pieces of so many bytes.")
    pieces_in_flight: int = Field(2, ge=1, description="Pieces posted at once. An abort waits for those.")

    @model_validator(mode="after")
    def _reachable(self) -> OneSidedConfig:
        if self.advertise is None and self.host in ("", "0.0.0.0", "::"):
            raise ValueError("`advertise` is needed when `host` is a wildcard: writers must know where to connect")
        return self
