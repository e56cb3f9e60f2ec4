"""Find plugins: the entry points of the group ``pdhub``, imported one by one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from pdhub.api.hooks import PROJECT


@dataclass(frozen=True)
class Source:
    """Where a plugin comes from, and the plugin itself or why there is none.

    Args:
        name: the entry point's name; unique together with ``distribution``.
        plugin: the module or object with hooks; None if ``error`` is set.
        error: one line; ``blocked`` tells a deliberate absence from a failure.
    """

    name: str
    distribution: str = ""
    version: str = ""
    plugin: object | None = None
    error: str = ""
    blocked: bool = False

    def __str__(self) -> str:
        return f"plugin '{self.name}' of {self.distribution} {self.version}" if self.distribution else f"'{self.name}'"


def normalized(distribution: str) -> str:
    """A distribution's name as package indexes compare them (``PDHub_X`` equals ``pdhub-x``)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def discover(block: Collection[str], extra: Iterable[object]) -> Iterator[Source]:
    """Every plugin that is installed, sorted by distribution and name, then those of ``extra``.

    Never raises for a broken one: its :attr:`Source.error` says what happened.
    """
    blocked = {normalized(b) for b in block}
    points = entry_points(group=PROJECT)
    for point in sorted(points, key=lambda p: (p.dist.name if p.dist else "", p.name)):
        yield _load(point, blocked)
    for plugin in extra:
        name = getattr(plugin, "__name__", None) or type(plugin).__name__
        yield Source(str(name), plugin=plugin)


def _load(point: EntryPoint, blocked: Collection[str]) -> Source:
    name = point.dist.name if point.dist else ""
    version = point.dist.version if point.dist else ""
    if normalized(name) in blocked:
        return Source(point.name, name, version, error="blocked by plugins.block", blocked=True)
    try:
        plugin = point.load()
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a plugin's import may raise anything, SystemExit included
        return Source(point.name, name, version, error=f"importing {point.value} raised {describe(error)}")
    if inspect.isclass(plugin):
        return Source(point.name, name, version, error=f"{point.value} is a class; name a module or an instance")
    return Source(point.name, name, version, plugin=plugin)


def describe(error: BaseException) -> str:
    """``TypeName: first line``, for one line of text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
