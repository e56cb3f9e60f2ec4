"""Finding NIXL's native library, and saying how to install it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import re
import sys
from importlib import metadata
from typing import Any

from pdhub.api import PluginError

OLDEST = (1, 5)
BUILDS = ("cu12", "cu13")


def load(build: str) -> Any:
    """The bindings of the installed build.

    NIXL's Python class is not used: it fixes the sleep of the progress thread at zero, so that every agent takes a
    whole core, idle or not.

    Args:
        build: ``cu12``, ``cu13``, or ``auto`` for what is installed; of both, the one of the torch that runs here.

    Raises:
        PluginError: it is missing, too old, or does not load.
    """
    wanted = BUILDS if build == "auto" else (build,)
    installed = [name for name in wanted if importlib.util.find_spec(f"nixl_{name}") is not None]
    if not installed:
        take = "cu12" if build == "auto" else build
        raise PluginError(f"NIXL is not installed ({' or '.join(wanted)})", hint=f'pip install "pdhub-nixl[{take}]"')
    name = installed[-1] if _torch_cuda() == "13" else installed[0]
    version = metadata.version(f"nixl-{name}")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
        raise PluginError(f"NIXL {version} is too old", hint=f'pip install -U "pdhub-nixl[{name}]"')
    _load_system_verbs_first()
    try:
        return importlib.import_module(f"nixl_{name}._bindings")
    except ImportError as error:
        raise PluginError(
            f"NIXL {version} ({name}) does not load: {error}", hint=f'pip install "pdhub-nixl[{name}]"'
        ) from error


def _load_system_verbs_first() -> None:
    """NIXL's wheels bring a libnl-route of their own. A host that has libibverbs gets the system's too; loaded after
    the wheel's, its destructor takes the wheel's list, and every process ends with a segmentation fault."""
    with contextlib.suppress(OSError):  # there is none: then there is one copy only
        ctypes.CDLL("libibverbs.so.1")


def _torch_cuda() -> str:
    """Major version of the CUDA that this process's torch was built for; empty if there is none."""
    torch = sys.modules.get("torch")
    return str(getattr(getattr(torch, "version", None), "cuda", None) or "").partition(".")[0]
