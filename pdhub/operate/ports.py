"""Ports of a tree: every fixed one must be free before anything starts, and ``0`` becomes a free one."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pdhub.api import ConfigError
from pdhub.config.models import Config
from pdhub.wire.server import elsewhere, remedy

_LOW, _HIGH = 20_000, 32_000
"""Below the range that Linux takes for outgoing connections: nobody else grabs one between check and use."""

ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Listener:
    """One address that the tree will listen on. ``path`` is its place in the configuration."""

    owner: str
    path: str
    host: str
    port: int


def listeners(config: Config) -> Iterator[Listener]:
    """Every address of the processes that ``pdhub up`` starts, nodes first. Free control ports are left to the
    node: nobody must know them beforehand."""
    for i, prefill in enumerate(config.prefill):
        if prefill.launch:
            yield Listener(prefill.name, f"prefill.{i}.port", prefill.host, prefill.port)
            if prefill.control_port:
                yield Listener(prefill.name, f"prefill.{i}.control_port", prefill.host, prefill.control_port)
    for i, pool in enumerate(config.pools):
        for j, node in enumerate(pool.nodes):
            if node.launch:
                yield Listener(node.name, f"pools.{i}.nodes.{j}.port", node.host, node.port)
                if node.control_port:
                    yield Listener(node.name, f"pools.{i}.nodes.{j}.control_port", node.host, node.control_port)
    yield Listener(ROUTER, "router.port", config.router.host, config.router.port)


def _try(host: str, port: int) -> OSError | None:
    """Why nobody can listen there now; None if somebody can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(1)
        except OSError as error:
            return error
    return None


def check(wanted: Iterable[Listener]) -> None:
    """Raise ConfigError that names *every* fixed port which is taken."""
    problems = [(item, why) for item in wanted if item.port and (why := _try(item.host, item.port))]
    if problems:
        raise ConfigError(
            "\n".join(
                f"{item.path}: {item.owner} cannot listen on {item.host}:{item.port}: {why.strerror or why}"
                for item, why in problems
            ),
            hint="; ".join(dict.fromkeys(_remedy(item, why) for item, why in problems)),
        )


def _remedy(item: Listener, why: OSError) -> str:
    if elsewhere(why) and item.owner != ROUTER:
        return "a node on another machine is started there; here it has `launch: false`"
    return remedy(why)


def free_port(host: str, taken: set[int], rng: random.Random) -> int:
    """A port that is free now and not in ``taken``, to which it is added."""
    for _ in range(2_000):
        port = rng.randrange(_LOW, _HIGH)
        if port not in taken and _try(host, port) is None:
            taken.add(port)
            return port
    raise ConfigError(f"no free port between {_LOW} and {_HIGH} on {host}")


def settle(config: Config, rng: random.Random) -> list[str]:
    """Overrides that give a free port to every listener whose port is 0. Raises as :func:`check`."""
    wanted = list(listeners(config))
    check(wanted)
    taken = {item.port for item in wanted}
    return [f"{item.path}={free_port(item.host, taken, rng)}" for item in wanted if item.port == 0]
