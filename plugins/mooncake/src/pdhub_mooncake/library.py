"""Finding Mooncake's native library, and saying how to install it."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from pdhub.api import PluginError

INSTALL = 'pip install "pdhub-mooncake[non-cuda]" (or cuda12, cuda13)'


def load() -> Any:
    """The class ``TransferEngine``. Raises PluginError if the library is missing or does not load."""
    if importlib.util.find_spec("mooncake") is None:
        raise PluginError("Mooncake is not installed", hint=INSTALL)
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ImportError as error:
        if "libibverbs" in str(error) or "libnl" in str(error):
            raise PluginError(
                f"Mooncake needs a system library, whatever the protocol: {error}",
                hint="apt-get install libibverbs1 (Debian, Ubuntu) or dnf install libibverbs",
            ) from error
        raise PluginError(f"Mooncake does not load: {error}", hint=INSTALL) from error
