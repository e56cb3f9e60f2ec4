"""Every value of a plan and where it came from, for ``pdhub config show``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from pdhub.config.build import Plan
from pdhub.config.origin import Path, dotted
from pdhub.policies.routing import Part, Routing

DEFAULT = "default"


def values(plan: Plan) -> list[tuple[str, Any, str]]:
    """``(path, value, source)`` of each leaf, plugin options with their defaults included, in the file's order."""
    data = plan.config.model_dump(mode="json")
    data["handoff"]["transport"]["config"] = _dump(plan.transport.config)
    _routing(data["policy"], plan.routing)
    data["launcher"]["config"] = _dump(plan.launcher.config)
    for pool in data["pools"]:
        pool["engine"]["config"] = _dump(plan.pools[pool["name"]].config)
    for prefill in data["prefill"]:
        prefill["engine"]["config"] = _dump(plan.prefill[prefill["name"]].config)
    return [(dotted(path), value, _source(plan, path)) for path, value in _leaves(data, ())]


def _routing(data: dict[str, Any], routing: Routing) -> None:
    """Put every plugin's whole options into the dumped section."""
    data["config"] = _dump(routing.base.config)
    _parts(data["filters"], routing.filters)
    _parts(data["scorers"], routing.scorers)
    for member, rule in zip(data["rules"], routing.rules, strict=True):
        _parts(member["filters"], rule.filters)
        _parts(member["scorers"], rule.scorers)
    if routing.prefill is not None:
        data["prefill"]["config"] = _dump(routing.prefill.config)
    if routing.shadow is not None:
        _routing(data["shadow"], routing.shadow)


def _parts(data: list[dict[str, Any]], parts: Sequence[Part]) -> None:
    for member, part in zip(data, parts, strict=True):
        member["config"] = _dump(part.config)


def _dump(model: BaseModel) -> dict[str, Any]:
    """Secrets stay hidden: pydantic prints a SecretStr as stars."""
    return model.model_dump(mode="json")


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and value:
        for key, member in value.items():
            yield from _leaves(member, (*path, key))
    elif isinstance(value, list) and value:
        for index, member in enumerate(value):
            yield from _leaves(member, (*path, index))
    else:
        yield path, value


def _source(plan: Plan, path: Path) -> str:
    exact = plan.origins.of(path)
    if exact is not None:
        return exact
    replaced = plan.origins.nearest(path)
    if replaced is not None and replaced.startswith(("--set", "env")):
        return replaced  # a whole section was set at once
    return DEFAULT
