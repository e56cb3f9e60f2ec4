"""The configuration of a tree: two senders, a node, a router; short limits, so that they are met."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import safety_kv as kv

from pdhub.core.handoff import largest_chunk_bytes
from pdhub.testing import toy

SENDERS = ("sender-0", "sender-1")
NODE, ROUTER = "node", "router"
SLOTS, LANDINGS, STAGING = 2, 6, 8
LIMIT_S = 2.0
TIMES = {"claim_ttl_s": LIMIT_S, "deadline_s": LIMIT_S, "ready_ttl_s": LIMIT_S, "fence_within_s": 10.0}
OPTIONS = {name: {"warm_bytes": LANDINGS * kv.LAYOUT.landing_bytes(kv.CAPACITY)} for name in ("shm", "tcp")}
"""Memory of no more than all landings is kept for use again, so that it is used again at once."""


def free_ports(count: int) -> list[int]:
    """All different."""
    socks = [socket.socket() for _ in range(count)]
    for sock in socks:
        sock.bind(("127.0.0.1", 0))
    found = [int(sock.getsockname()[1]) for sock in socks]
    for sock in socks:
        sock.close()
    return found


def configuration(transport: str, options: dict[str, Any], ports: list[int], directory: Path) -> dict[str, Any]:
    """Args:
    transport, options: that moves the bytes. ports: two of senders, the node's, the router's, the control channel's.
    """
    board = str(directory / "board")
    moves = {"board": board, "inner": transport, "options": OPTIONS.get(transport, {}) | options}
    engine = {"type": "safety", "config": {"board": board, "slots": SLOTS}}
    senders = [{"name": name, "port": port, "engine": engine} for name, port in zip(SENDERS, ports, strict=False)]
    return {
        "model": {"name": "safety", "tokenizer": str(toy.write_tokenizer(directory / "tokenizer"))},
        "plugins": {"modules": ["safety_parts"]},
        "router": {
            "port": ports[3],
            "retries": 0,
            "connect_timeout_s": 0.5,
            "first_byte_timeout_s": 5.0,
            "idle_timeout_s": 4.0,
            "probe_interval_s": 1.0,
            "probe_timeout_s": 2.0,
            "breaker_open_s": 0.1,
        },
        "handoff": {
            "transport": {"type": "board", "config": moves},
            "verify": True,
            "staging_bytes": STAGING * largest_chunk_bytes(kv.LAYOUT, kv.CHUNK),
            **TIMES,
        },
        "prefill": senders,
        "pools": [
            {
                "name": "nodes",
                "engine": engine,
                "landings": LANDINGS,
                "nodes": [{"name": NODE, "port": ports[2], "control_port": ports[4]}],
            }
        ],
        "policy": {"type": "round_robin"},
    }
