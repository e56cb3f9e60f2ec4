"""Every value of a plan and where it came from, for ``pdhub config show``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from pdhub.config.build import Plan
from pdhub.config.origin import Path, dotted

DEFAULT = "default"


def values(plan: Plan) -> list[tuple[str, Any, str]]:
    """``(path, value, source)`` of each leaf, plugin options with their defaults included, in the file's order."""
    data = plan.config.model_dump(mode="json")
    data["handoff"]["transport"]["config"] = _dump(plan.transport.config)
    data["policy"]["config"] = _dump(plan.policy.config)
    data["launcher"]["config"] = _dump(plan.launcher.config)
    for pool in data["pools"]:
        pool["engine"]["config"] = _dump(plan.pools[pool["name"]].config)
    for prefill in data["prefill"]:
        prefill["engine"]["config"] = _dump(plan.prefill[prefill["name"]].config)
    return [(dotted(path), value, _source(plan, path)) for path, value in _leaves(data, ())]


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
