"""What a single value cannot tell: rules over the whole configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as FilePath

from pdhub.api.errors import ConfigError
from pdhub.config.models import Config, NodeConfig
from pdhub.config.origin import Origins, Path

_ANY_ADDRESS = ("0.0.0.0", "::", "")


def nodes(config: Config) -> Iterator[tuple[Path, NodeConfig]]:
    """Every process and its place: prefill instances, then each pool's nodes."""
    for i, prefill in enumerate(config.prefill):
        yield ("prefill", i), prefill
    for i, pool in enumerate(config.pools):
        for j, node in enumerate(pool.nodes):
            yield ("pools", i, "nodes", j), node


def check_config(config: Config, origins: Origins) -> None:
    """Unique names, unique listening addresses, reachable nodes. Raises ConfigError."""
    _unique([(("pools", i, "name"), pool.name) for i, pool in enumerate(config.pools)], "pool", origins)
    _unique([((*path, "name"), node.name) for path, node in nodes(config)], "node", origins)
    models: list[tuple[Path, str]] = [(("model", "name"), config.model.name)]
    models += [(("model", "aliases", i), alias) for i, alias in enumerate(config.model.aliases)]
    _unique(models, "model", origins)
    _addresses(config, origins)
    _served(config, origins)
    _recycled(config, origins)


def _served(config: Config, origins: Origins) -> None:
    """Prefill instances name pools that exist."""
    names = [pool.name for pool in config.pools]
    for i, prefill in enumerate(config.prefill):
        for j, name in enumerate(prefill.pools):
            if name not in names:
                where = origins.where(("prefill", i, "pools", j))
                raise ConfigError(f"no pool is named '{name}'", where=where, hint=f"there are: {', '.join(names)}")


def _recycled(config: Config, origins: Origins) -> None:
    """Nodes that may be started again exist."""
    names = [node.name for pool in config.pools for node in pool.nodes]
    for i, name in enumerate(config.router.recycle.nodes):
        if name not in names:
            where = origins.where(("router", "recycle", "nodes", i))
            raise ConfigError(f"no pool has a node '{name}'", where=where, hint=f"there are: {', '.join(names)}")


def _unique(names: list[tuple[Path, str]], what: str, origins: Origins) -> None:
    seen: dict[str, Path] = {}
    for path, name in names:
        if name in seen:
            hint = f"rename one; the other is at {origins.where(seen[name])}"
            raise ConfigError(f"two {what}s are named '{name}'", where=origins.where(path), hint=hint)
        seen[name] = path


def _addresses(config: Config, origins: Origins) -> None:
    seen: list[tuple[str, int, Path]] = []
    wanted: list[tuple[str, int, Path]] = [(config.router.host, config.router.port, ("router", "port"))]
    for path, node in nodes(config):
        if node.port == 0 and not node.launch:
            hint = "give the port that it listens on"
            raise ConfigError(
                "a node that is not launched needs its port", where=origins.where((*path, "port")), hint=hint
            )
        wanted.append((node.host, node.port, (*path, "port")))
        wanted.append((node.host, node.control_port, (*path, "control_port")))
    for host, port, path in wanted:
        for other, used, first in seen:
            if port == used and port != 0 and _same_host(host, other):
                hint = f"choose another; the first is {origins.where(first)}"
                raise ConfigError(f"port {port} of {host} is used twice", where=origins.where(path), hint=hint)
        seen.append((host, port, path))


def _same_host(a: str, b: str) -> bool:
    a, b = ("127.0.0.1" if h == "localhost" else h for h in (a, b))
    return a == b or (a in _ANY_ADDRESS and _is_local(b)) or (b in _ANY_ADDRESS and _is_local(a))


def _is_local(host: str) -> bool:
    return host in _ANY_ADDRESS or host.startswith("127.") or host in ("localhost", "::1")


def check_model(config: Config, origins: Origins, *, detokenises: bool) -> None:
    """The model's files are on this machine, if anything here loads them. Raises ConfigError.

    ``path`` may be a place on the nodes' machines: a router's machine need not have the weights.

    Args:
        detokenises: the router makes text of tokens.
    """
    loaded = any(node.launch and _is_local(node.host) for _, node in nodes(config))
    loaded = loaded or (detokenises and config.model.tokenizer is None)
    for key, needed in (("path", loaded), ("tokenizer", True)):
        value = getattr(config.model, key)
        if needed and value is not None and not FilePath(value).exists():
            where = origins.where(("model", key))
            hint = "relative paths start at the working directory; check it, or download the model"
            raise ConfigError(f"no file or directory '{value}'", where=where, hint=hint)
