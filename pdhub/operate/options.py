"""Options of the built-in launcher; apart, so that registering it costs nothing."""

from __future__ import annotations

from pydantic import Field

from pdhub.api import PluginConfig


class LocalConfig(PluginConfig):
    """Options of the ``local`` launcher."""

    grace_s: float = Field(
        3.0, ge=0, le=60, description="When `pdhub up` dies, its children get SIGTERM and so long until SIGKILL."
    )
