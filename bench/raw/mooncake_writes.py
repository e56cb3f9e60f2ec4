"""Mooncake alone: an engine in another process, and one write of one range into it over tcp.

python -m raw.mooncake_writes NBYTES      the other process: prints where to write, ends with its stdin
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pdhub_mooncake.library import load
from pdhub_mooncake.settings import forced


class Engine:
    """A TransferEngine with one registered buffer."""

    def __init__(self, nbytes: int) -> None:
        self.engine: Any = load()()
        with forced("tcp"):
            if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
                raise RuntimeError("Mooncake does not start")
        self.buffer = mmap.mmap(-1, nbytes)
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        ctypes.memset(self.address, 1, nbytes)
        self.engine.register_memory(self.address, nbytes)

    def write(self, session: str, address: int) -> None:
        if self.engine.transfer_sync_write(session, self.address, address, self.nbytes):
            raise RuntimeError("the raw write failed")


@contextlib.contextmanager
def raw_mooncake(nbytes: int) -> Iterator[Callable[[], None]]:
    other = subprocess.Popen(
        [sys.executable, "-m", "raw.mooncake_writes", str(nbytes)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        where = json.loads(other.stdout.readline())
        here = Engine(nbytes)
        yield lambda: here.write(where["session"], where["address"])
        here.engine.unregister_memory(here.address)
    finally:
        other.stdin.close()
        other.wait()


def main(nbytes: int) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    target = Engine(nbytes)
    session = f"127.0.0.1:{target.engine.get_rpc_port()}"
    print(json.dumps({"session": session, "address": target.address}), file=answers)
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]))
