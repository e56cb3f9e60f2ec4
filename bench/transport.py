"""How fast the transports move KV, against the plainest thing that moves the same bytes in the same run.

* ``shm`` against ``memmove`` between two warm buffers of one process;
* ``tcp`` against a raw loopback socket: one send of all bytes, received in place by another process, one byte back;
* ``nixl`` against NIXL alone, one descriptor (``UCX_TLS`` and ``UCX_NET_DEVICES`` count for both);
* ``mooncake`` against Mooncake alone over tcp, one range.

The node is another process. Each size has two figures. *Grant kept* is one chunk after the other into one landing, as
within a hand-over: each side moves its bytes twice, and the second time counts. *New landing* allocates, grants and
prepares a landing for every write, as happens when a sender joins: that is not in the time, but a pause follows, as
prefill makes one, and another one precedes the plain write. Runs are interleaved; figures are medians, a ratio is the
median of the ratios of neighbouring runs, *best* that of the fastest runs, and *processor* that of the processor time
which this process spends in total (with a grant kept): these two are closer to the truth on a busy machine.

    python bench/transport.py [--runs 7] [--sizes 1 16 64 256] [--transport shm] [--json] [--out FILE]

The record in ``bench/results/transport.json`` is made with

    UCX_TLS=tcp,sm,self UCX_NET_DEVICES=lo python bench/transport.py --runs 21 --out bench/results/transport.json

and its ``load_before`` says how busy the machine was: then only the ratios mean something.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import mmap
import multiprocessing
import os
import platform
import shlex
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pdhub.api import Grant, Peer, PeerMetadata, Region, TransferState, WriteOp
from pdhub.registry import load
from pdhub.testing.transport_kit import SideProcess
from pdhub.testing.transport_writer import unpack_grant, unpack_metadata

GOALS = {"shm": 0.8, "tcp": 0.8, "nixl": 0.9, "mooncake": 0.9}
OPTIONS = {"mooncake": {"protocol": "tcp"}}
NEEDS = {"nixl": ("nixl_cu12", "nixl_cu13"), "mooncake": ("mooncake",)}
DISTRIBUTIONS = ("pdhub", "nixl-cu12", "nixl-cu13", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
MIB = 1 << 20
JOINED_S = 0.005
"""Between a sender's join and its first chunk: no prefill is quicker."""


def warm(nbytes: int) -> tuple[mmap.mmap, int]:
    """A private buffer whose pages are there, and its address."""
    buffer = mmap.mmap(-1, nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    ctypes.memset(address, 1, nbytes)
    return buffer, address


@contextlib.contextmanager
def memcpy(nbytes: int) -> Iterator[Callable[[], None]]:
    (_, source), (_, target) = keep = warm(nbytes), warm(nbytes)

    def once() -> None:
        ctypes.memmove(target, source, nbytes)

    yield once
    del keep


def receive(listener: socket.socket, nbytes: int) -> None:
    """The other end of the raw socket."""
    buffer, _ = warm(nbytes)
    view = memoryview(buffer)
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        got = 0
        while got < nbytes:
            count = sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
            if not count:
                return
            got += count
        sock.sendall(b"x")


@contextlib.contextmanager
def raw_socket(nbytes: int) -> Iterator[Callable[[], None]]:
    listener = socket.create_server(("127.0.0.1", 0))
    child = multiprocessing.get_context("fork").Process(target=receive, args=(listener, nbytes), daemon=True)
    child.start()
    source, _ = warm(nbytes)
    view = memoryview(source)
    with socket.create_connection(listener.getsockname()) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def once() -> None:
            sock.sendall(view)
            if sock.recv(1) != b"x":
                raise RuntimeError("the raw receiver is gone")

        yield once
    child.join()
    listener.close()


def raw_nixl(nbytes: int) -> contextlib.AbstractContextManager[Callable[[], None]]:
    from raw.nixl_writes import raw_nixl

    return raw_nixl(nbytes)


def raw_mooncake(nbytes: int) -> contextlib.AbstractContextManager[Callable[[], None]]:
    from raw.mooncake_writes import raw_mooncake

    return raw_mooncake(nbytes)


REFERENCES = {
    "shm": ("memcpy", memcpy),
    "tcp": ("raw socket", raw_socket),
    "nixl": ("raw NIXL", raw_nixl),
    "mooncake": ("raw Mooncake", raw_mooncake),
}


class Sender:
    """This process, writing to a node in another one."""

    def __init__(self, name: str) -> None:
        options = OPTIONS.get(name, {})
        self.node = SideProcess(name, options)
        spec = load(warn=False).transport(name)
        self.transport = spec.factory(spec.config.model_validate(options))
        self.transport.open()
        self.peer: Peer | None = None
        self.grant, metadata = self.landing(MIB)
        self.peer = self.transport.connect(metadata)
        self.free()

    def landing(self, nbytes: int) -> tuple[Grant, PeerMetadata]:
        """A fresh landing at the node."""
        answer = self.node.ask("target", nbytes=nbytes)
        self.grant = unpack_grant(answer["grant"])
        if self.peer is not None:
            self.peer.prepare(self.grant)
        return self.grant, unpack_metadata(answer["metadata"])

    def free(self) -> None:
        self.node.ask("free", region_id=self.grant.region_id)

    def write(self, source: Region) -> None:
        assert self.peer is not None
        transfer = self.transport.write(self.peer, self.grant, [WriteOp(source, 0, 0, source.nbytes)])
        if transfer.wait(60) is not TransferState.DONE:
            raise RuntimeError(f"the write ended {transfer.state}: {transfer.error}")

    def close(self) -> None:
        self.transport.close()
        self.node.close()


def seconds(what: Callable[[], None], work: list[float] | None = None) -> float:
    """``work``: where to note this process's processor time."""
    start, busy = time.perf_counter(), time.process_time()
    what()
    took = time.perf_counter() - start
    if work is not None:
        work.append(time.process_time() - busy)
    return took


def measure(name: str, nbytes: int, runs: int) -> dict[str, float | int | str]:
    """One size of one transport; GB/s are 10^9 bytes a second."""
    sender = Sender(name)
    label, reference = REFERENCES[name]
    mine: list[float] = []
    theirs: list[float] = []
    times: dict[str, list[float]] = {"reference": [], "kept": [], "rested": [], "fresh": []}
    try:
        with reference(nbytes) as plain:
            source = sender.transport.allocate(nbytes)
            ctypes.memset(source.address, 1, nbytes)
            sender.landing(nbytes)
            cold = seconds(lambda: sender.write(source))
            for run in range(runs + 2):
                sender.write(source)
                kept = seconds(lambda: sender.write(source), mine)
                plain()
                direct = seconds(plain, theirs)
                sender.free()
                time.sleep(0.005)  # the writer hands the landing's memory back
                sender.landing(nbytes)
                time.sleep(JOINED_S)
                fresh = seconds(lambda: sender.write(source))
                time.sleep(JOINED_S)
                rested = seconds(plain)
                if run >= 2:  # the first two warm up
                    for key, value in zip(times, (direct, kept, rested, fresh), strict=True):
                        times[key].append(value)
    finally:
        sender.close()
    speed = {key: nbytes / statistics.median(values) / 1e9 for key, values in times.items()}
    ratio = {
        key: statistics.median(a / b for a, b in zip(times[against], times[key], strict=True))
        for key, against in (("kept", "reference"), ("fresh", "rested"))
    }
    return {
        "transport": name,
        "mib": nbytes // MIB,
        "against": label,
        "processor_ratio": round(statistics.median(theirs[2:]) / statistics.median(mine[2:]), 3),
        "best_ratio": round(min(times["reference"]) / min(times["kept"]), 3),
        "reference_gb_s": round(speed["reference"], 3),
        "gb_s": round(speed["kept"], 3),
        "ratio": round(ratio["kept"], 3),
        "new_landing_gb_s": round(speed["fresh"], 3),
        "new_landing_ratio": round(ratio["fresh"], 3),
        "first_ever_gb_s": round(nbytes / cold / 1e9, 3),
    }


def show(rows: list[dict[str, float | int | str]]) -> None:
    table = Table(title="KV transports, two processes (goals: " + ", ".join(f"{n} {g}" for n, g in GOALS.items()) + ")")
    for column in (
        "transport",
        "MiB",
        "against",
        "processor",
        "best",
        "its GB/s",
        "grant kept",
        "ratio",
        "new landing",
        "ratio",
        "first ever",
    ):
        table.add_column(column, justify="left" if column in ("transport", "against") else "right")
    for row in rows:
        cells = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()]
        for index in (3, 4, 7, 9):
            good = float(list(row.values())[index]) >= GOALS[str(row["transport"])]
            cells[index] = f"[{'green' if good else 'yellow'}]{cells[index]}[/]"
        table.add_row(*cells)
    Console().print(table)


def installed(name: str) -> bool:
    """Its library is there."""
    return name not in NEEDS or any(importlib.util.find_spec(module) for module in NEEDS[name])


def record(rows: list[dict[str, float | int | str]]) -> dict[str, object]:
    """The figures, and where they come from."""
    found = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(sys.argv),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("UCX_", "MC_"))},
        "machine": f"{os.cpu_count()} × {model[0].partition(': ')[2] if model else platform.machine()}",
        "load_before": LOAD_BEFORE,
        "versions": {"python": platform.python_version(), **found},
        "goals": GOALS,
        "rows": rows,
    }


LOAD_BEFORE = round(os.getloadavg()[0], 2)
"""Other work on the machine when this began: ratios are of one run, figures in GB/s are not comparable under load."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 64, 256], metavar="MIB")
    parser.add_argument("--transport", choices=sorted(REFERENCES), nargs="+", help="default: all that are installed")
    parser.add_argument("--json", action="store_true", help="print one JSON list and nothing else")
    parser.add_argument("--out", type=Path, help="write the figures and where they come from")
    args = parser.parse_args()
    names = args.transport or [name for name in REFERENCES if installed(name)]
    rows = [measure(name, size * MIB, args.runs) for name in names for size in args.sizes]
    if args.out is not None:
        args.out.write_text(json.dumps(record(rows), indent=1) + "\n")
    if args.json:
        print(json.dumps(rows))
    else:
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
