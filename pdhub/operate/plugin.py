"""The built-in launcher, registered as any plugin is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pdhub.api import Launcher, LauncherSpec, Stability, hookimpl
from pdhub.operate.options import LocalConfig


def _local(config: Any) -> Launcher:
    from pdhub.operate.launcher import LocalLauncher

    return LocalLauncher(config)


@hookimpl
def pdhub_register_launchers() -> Iterable[LauncherSpec]:
    return [
        LauncherSpec(
            name="local",
            summary="Child processes on this machine, each behind a guard that leaves no orphan.",
            config=LocalConfig,
            stability=Stability.BETA,
            factory=_local,
        )
    ]
