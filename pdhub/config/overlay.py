"""Lay environment variables and flags over the file's values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdhub.api.errors import ConfigError
from pdhub.config.load import scalar
from pdhub.config.models import Config
from pdhub.config.origin import Origins, Path

ENV_PREFIX = "PDHUB_"


@dataclass(frozen=True, slots=True)
class Assignment:
    """One value to set. ``keys`` may name a list's member by its index or by its ``name``."""

    keys: tuple[str, ...]
    value: Any
    source: str


def from_flags(overrides: Sequence[str]) -> list[Assignment]:
    """``a.b.0.c=value``; the value is read as YAML. Raises ConfigError for anything else."""
    found = []
    for text in overrides:
        path, equals, value = text.partition("=")
        keys = tuple(re.sub(r"\[(\d+)\]", r".\1", path.strip()).split("."))
        if not equals or not all(keys):
            hint = "for example router.port=9000 or pools.0.engine.config.slots=2"
            raise ConfigError(f"--set {text!r} is no assignment of the form path=value", hint=hint)
        found.append(_assignment(keys, value, f"--set {path.strip()}"))
    return found


def from_environment(environ: Mapping[str, str]) -> list[Assignment]:
    """``PDHUB_ROUTER__PORT=9000``: only names with ``__`` are configuration, because orchestrators make
    names such as ``PDHUB_PORT`` on their own. Raises ConfigError for an unknown section."""
    found = []
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or "__" not in name:
            continue
        keys = tuple(name.removeprefix(ENV_PREFIX).lower().split("__"))
        if keys[0] not in Config.model_fields or not all(keys):
            near = difflib.get_close_matches(keys[0], Config.model_fields, n=1)
            hint = f"did you mean {ENV_PREFIX}{near[0].upper()}__…?" if near else "unset it, or see docs/config.md"
            raise ConfigError(f"environment variable {name} sets no part of the configuration", hint=hint)
        found.append(_assignment(keys, environ[name], f"env {name}"))
    return found


def _assignment(keys: tuple[str, ...], text: str, source: str) -> Assignment:
    try:
        return Assignment(keys, scalar(text), source)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error.message}", hint=error.hint) from None


def apply(data: dict[str, Any], origins: Origins, assignments: Iterable[Assignment]) -> None:
    """Set each value in ``data``, in order, and its origin. Raises ConfigError where there is nothing to set."""
    for item in assignments:
        _set(data, origins, item)


def _set(data: dict[str, Any], origins: Origins, item: Assignment) -> None:
    place: Any = data
    path: Path = ()
    for number, key in enumerate(item.keys):
        step = _step(place, key, item)
        path = (*path, step)
        if number == len(item.keys) - 1:
            place[step] = item.value
            origins.set(path, item.source)
            return
        if isinstance(place, dict) and place.get(step) is None:
            place[step] = {}
        place = place[step]


def _step(place: Any, key: str, item: Assignment) -> str | int:
    if isinstance(place, dict):
        return key
    where = ".".join(item.keys)
    if not isinstance(place, list):
        raise ConfigError(f"{item.source}: nothing lies below a plain value in '{where}'", hint="shorten the path")
    names = [member.get("name") for member in place if isinstance(member, dict)]
    if key.isdecimal() and int(key) < len(place):
        return int(key)
    if key in names:
        return names.index(key)
    have = ", ".join(str(n) for n in names if n) or f"0 to {len(place) - 1}"
    raise ConfigError(f"{item.source}: no member '{key}' in '{where}'", hint=f"there are: {have}")
