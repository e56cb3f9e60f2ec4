"""pydantic's findings → one ConfigError that says where, what, and what to do."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from pdhub.api.errors import ConfigError
from pdhub.config.origin import Origins, Path

_SECRET = re.compile(r"key|token|secret|password", re.IGNORECASE)


def explain(error: ValidationError, model: type[BaseModel], prefix: Path, origins: Origins) -> ConfigError:
    """One error for all findings.

    Args:
        model: what was validated; ``prefix`` is its place in the configuration.
    """
    found = [_finding(item, model, prefix, origins) for item in error.errors(include_url=False)]
    if len(found) == 1:
        return found[0]
    lines = "".join(f"\n  {f.message}" + (f" ({f.hint})" if f.hint else "") for f in found)
    return ConfigError(f"{len(found)} problems in the configuration:{lines}", hint="correct them from the top")


def _finding(item: Mapping[str, Any], model: type[BaseModel], prefix: Path, origins: Origins) -> ConfigError:
    location: Path = tuple(item["loc"])
    where = origins.where((*prefix, *location))
    if item["type"] == "extra_forbidden":
        known = sorted(_keys(model, location[:-1]))
        near = nearest(str(location[-1]), known)
        hint = f"did you mean '{near}'?" if near else f"known keys: {', '.join(known) or 'none'}"
        return ConfigError(f"unknown key '{location[-1]}'", where=where, hint=hint)
    description = _description(model, location)
    if item["type"] == "missing":
        hint = f"add it: {description}" if description else "add it"
        return ConfigError("this key is required", where=where, hint=hint)
    message = str(item["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if not _SECRET.search(str(location[-1:])) and isinstance(item["input"], str | int | float | bool | None):
        message += f", not {item['input']!r}"
    return ConfigError(message, where=where, hint=description or "see docs/config.md")


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The known word that was probably meant."""
    found = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return found[0] if found else None


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Models that a value of this annotation may be."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _models(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for option in get_args(annotation):
            yield from _models(option)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation


def _inner(annotation: Any) -> Iterator[Any]:
    """Annotations of a container's members."""
    origin = get_origin(annotation)
    if origin is Annotated or origin in (Union, types.UnionType):
        options = get_args(annotation)[:1] if origin is Annotated else get_args(annotation)
        for option in options:
            yield from _inner(option)
    elif origin is not None and get_args(annotation):
        yield get_args(annotation)[-1] if issubclass(origin, Mapping) else get_args(annotation)[0]


def _fields(model: type[BaseModel], key: str) -> FieldInfo | None:
    for name, info in model.model_fields.items():
        if key in (name, info.alias):
            return info
    return None


def _annotations(model: type[BaseModel], location: Path) -> list[Any]:
    """Annotations that ``location`` may have; empty if it leads nowhere known."""
    here: list[Any] = [model]
    for part in location:
        following: list[Any] = []
        for annotation in here:
            inside = [f.annotation for m in _models(annotation) if (f := _fields(m, str(part))) is not None]
            following += inside or list(_inner(annotation))
        here = following
    return here


def _keys(model: type[BaseModel], location: Path) -> set[str]:
    return {
        info.alias or name
        for annotation in _annotations(model, location)
        for found in _models(annotation)
        for name, info in found.model_fields.items()
    }


def _description(model: type[BaseModel], location: Path) -> str | None:
    if not location:
        return None
    for annotation in _annotations(model, location[:-1]):
        for found in _models(annotation):
            info = _fields(found, str(location[-1]))
            if info is not None:
                return info.description
    return None
