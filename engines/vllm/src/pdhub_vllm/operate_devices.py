"""How KV really travels from servers of this machine: devices that exist, and devices that they opened."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pdhub.api import Finding, NodeSpec, Severity
from pdhub_vllm.config import VLLMConfig

LIBRARIES: Final = {
    "libuct_ib": "UCX verbs",
    "libfabric": "libfabric",
    "libuct_cuda": "UCX CUDA",
    "libplugin_LIBFABRIC": "NIXL libfabric",
    "libplugin_UCX": "NIXL UCX",
}
"""File names whose mapping says that a process loaded that path."""


def examine(node: NodeSpec, config: VLLMConfig, root: Path = Path("/")) -> Iterator[Finding]:
    """Findings about one server, if it runs on this machine and may be looked at.

    Args:
        root: where ``/proc`` and ``/sys`` are.
    """
    if not is_local(node):
        message = f"runs on another machine, whose devices cannot be seen; run `pdhub doctor` on {node.host} too"
        yield Finding(Severity.INFO, node.name, message)
        return
    devices = rdma_devices(root)
    yield from _inventory(node, config, devices, root)
    port = urlsplit(node.url).port
    pids = _family(root, port) if port else []
    if not pids:
        message = "its process cannot be looked at (another user's, or another container's)"
        yield Finding(Severity.INFO, node.name, message, "run `pdhub doctor` as its user, in its namespace")
        return
    opened = sorted({d for pid in pids for d in _verbs(root, pid)})
    loaded = sorted({name for pid in pids for name in _loaded(root, pid)})
    if opened:
        message = f"KV can go by RDMA: it has opened {', '.join(opened)} ({', '.join(loaded) or 'no known library'})"
        yield Finding(Severity.INFO, node.name, message)
    elif devices:
        message = f"this machine has RDMA ({', '.join(devices)}) but the server has opened none of it: KV goes by TCP, "
        message += "shared memory or, between GPUs of one machine, CUDA IPC"
        fix = "check UCX_TLS, UCX_NET_DEVICES and `nixl_backends`, and that /dev/infiniband is in its container"
        yield Finding(Severity.WARNING, node.name, message, fix)
    else:
        message = "KV goes by TCP, shared memory or CUDA IPC: this machine has no RDMA device"
        yield Finding(Severity.INFO, node.name, message)


def is_local(node: NodeSpec) -> bool:
    """Its address is one of this machine's: this machine can listen there."""
    host = urlsplit(node.url).hostname or ""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def rdma_devices(root: Path) -> list[str]:
    """Verbs devices with an active port, each with its driver, such as ``rdmap0s6 (efa)``."""
    out = []
    for device in sorted(_entries(root / "sys/class/infiniband")):
        driver = (device / "device/driver").resolve().name if (device / "device/driver").exists() else "unknown driver"
        states = [_read(port / "state") for port in _entries(device / "ports")]
        if not states or any("ACTIVE" in state for state in states):
            out.append(f"{device.name} ({driver})")
    return out


def _inventory(node: NodeSpec, config: VLLMConfig, devices: list[str], root: Path) -> Iterator[Finding]:
    wants_efa = config.serve.env.get("FI_PROVIDER") == "efa" or config.serve.mooncake_protocol == "efa"
    if wants_efa and not any("(efa)" in device for device in devices):
        yield Finding(
            Severity.ERROR, node.name, "is to use EFA, and this machine has no EFA device that is up",
            "install the EFA driver, and start the instance type with EFA enabled",
        )  # fmt: skip
    gpus = (root / "proc/driver/nvidia").exists()
    peer = any((root / "sys/module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem", "gdrdrv"))
    if devices and gpus and not peer:
        message = "nvidia_peermem is not loaded: GPUDirect RDMA works only where kernel and libraries support dma-buf"
        yield Finding(Severity.WARNING, node.name, message, "modprobe nvidia_peermem, or check that dma-buf is used")


def _family(root: Path, port: int) -> list[int]:
    """The process that listens on a port and all that it started: vLLM's engine and workers are its children."""
    inodes = _listening(root, port)
    parents: dict[int, int] = {}
    first: list[int] = []
    for entry in _entries(root / "proc"):
        if not entry.name.isdigit():
            continue
        stat = _read(entry / "stat")
        if ")" in stat:
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
        if inodes & {target for target in _links(entry / "fd") if target.startswith("socket:")}:
            first.append(int(entry.name))
    found = list(first)
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid and child not in found]
    return found


def _listening(root: Path, port: int) -> set[str]:
    out = set()
    for table in ("tcp", "tcp6"):
        for line in _read(root / "proc/net" / table).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                out.add(f"socket:[{fields[9]}]")
    return out


def _verbs(root: Path, pid: int) -> set[str]:
    links = _links(root / f"proc/{pid}/fd")
    return {Path(target).name for target in links if target.startswith("/dev/infiniband/uverbs")}


def _loaded(root: Path, pid: int) -> set[str]:
    maps = _read(root / f"proc/{pid}/maps")
    return {name for library, name in LIBRARIES.items() if library in maps}


def _entries(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:
        return []


def _links(path: Path) -> list[str]:
    out = []
    for entry in _entries(path):
        try:
            out.append(os.readlink(entry))
        except OSError:
            continue
    return out


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
