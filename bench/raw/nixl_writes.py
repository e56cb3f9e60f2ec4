"""NIXL alone: an agent in another process, and one write of one descriptor into it.

The agents have the settings that the plugin gives its own (a progress thread that sleeps on events): NIXL's defaults
make one that spins, which on few cores takes the processor from the copy itself.

    python -m raw.nixl_writes NBYTES      the other process: prints where to write, ends with its stdin
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

from pdhub_nixl.library import load


class Agent:
    """A NIXL agent with one registered buffer."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.nixl: Any = load("auto")
        config = self.nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = 5000
        self.agent = self.nixl.nixlAgent(name, config)
        self.backend = self.agent.createBackend("UCX", {})
        self.buffer = mmap.mmap(-1, nbytes)
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        ctypes.memset(self.address, 1, nbytes)
        self.memory = self.nixl.nixlRegDList(self.nixl.DRAM_SEG, [(self.address, nbytes, 0, "")])
        self.agent.registerMem(self.memory, [self.backend])

    def write(self, remote: str, address: int) -> None:
        """The whole buffer, spinning until it is there."""
        nixl = self.nixl
        source = nixl.nixlXferDList(nixl.DRAM_SEG, [(self.address, self.nbytes, 0)])
        target = nixl.nixlXferDList(nixl.DRAM_SEG, [(address, self.nbytes, 0)])
        request = self.agent.createXferReq(nixl.NIXL_WRITE, source, target, remote, "", [self.backend])
        status = self.agent.postXferReq(request, "")
        while status == nixl.NIXL_IN_PROG:
            status = self.agent.getXferStatus(request)
        if status != nixl.NIXL_SUCCESS:
            raise RuntimeError(f"the raw write ended as {status}")
        self.agent.releaseXferReq(request)

    def close(self) -> None:
        self.agent.deregisterMem(self.memory, [self.backend])
        self.agent = None


@contextlib.contextmanager
def raw_nixl(nbytes: int) -> Iterator[Callable[[], None]]:
    other = subprocess.Popen(
        [sys.executable, "-m", "raw.nixl_writes", str(nbytes)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert other.stdin is not None
    assert other.stdout is not None
    here = Agent("raw-writer", nbytes)
    try:
        where = json.loads(other.stdout.readline())
        here.agent.loadRemoteMD(bytes.fromhex(where["metadata"]))
        yield lambda: here.write("raw-target", where["address"])
        here.agent.invalidateRemoteMD("raw-target")
    finally:
        here.close()
        other.stdin.close()
        other.wait()


def main(nbytes: int) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    target = Agent("raw-target", nbytes)
    print(json.dumps({"metadata": target.agent.getLocalMD().hex(), "address": target.address}), file=answers)
    sys.stdin.read()
    target.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
