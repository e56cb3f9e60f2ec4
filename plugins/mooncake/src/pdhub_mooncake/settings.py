"""The only place here that touches the environment: Mooncake takes its choice of protocol from nowhere else."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

FORCED_BY = {
    "tcp": ("MC_FORCE_TCP",),
    "rdma": ("MC_FORCE_HCA",),
    "nvlink": ("MC_FORCE_MNNVL",),
    "nvlink_intra": ("MC_INTRANODE_NVLINK", "MC_INTRA_NVLINK"),
}
_lock = threading.Lock()


@contextlib.contextmanager
def forced(protocol: str) -> Iterator[None]:
    """Engines that start inside use ``protocol``; afterwards the environment is as before, for other engines of this
    process."""
    with _lock:
        names = {name for names in FORCED_BY.values() for name in names}
        before = {name: os.environ.pop(name) for name in names if name in os.environ}
        os.environ.update(dict.fromkeys(FORCED_BY[protocol], "1"))
        try:
            yield
        finally:
            for name in names:
                os.environ.pop(name, None)
            os.environ.update(before)
