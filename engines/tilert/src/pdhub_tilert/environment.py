"""The only place here that reads the process's environment: to hand it on to a server."""

from __future__ import annotations

import os

from pdhub.api import Process


def with_process(process: Process) -> dict[str, str]:
    """This environment with what a process is to have."""
    secrets = {name: os.environ[source] for name, source in process.secrets.items() if source in os.environ}
    return {**os.environ, **process.env, **secrets}
