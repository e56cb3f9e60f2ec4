"""JSON Schema of the configuration file, options of installed plugins included, for editors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from pdhub.api.plugin import EngineSpec, LauncherSpec, PluginSpec, PolicyPart, PolicySpec, TransportSpec
from pdhub.config.models import Config
from pdhub.registry import Registry

_REF = "#/$defs/{model}"


def json_schema(registry: Registry) -> dict[str, Any]:
    """The schema. Each ``type:`` is one of the installed names, and decides what ``config:`` may hold."""
    parts = {part: [s for s in registry.specs(PolicySpec) if s.part is part] for part in PolicyPart}
    kinds: dict[str, Sequence[PluginSpec]] = {
        "engine": registry.specs(EngineSpec),
        "transport": registry.specs(TransportSpec),
        "admission": parts[PolicyPart.ADMISSION],
        "launcher": registry.specs(LauncherSpec),
        "policy": parts[PolicyPart.POLICY],
    }
    own: dict[str, Sequence[PluginSpec]] = {
        "PolicyConfig": parts[PolicyPart.POLICY],
        "RoutingConfig": parts[PolicyPart.POLICY],
        "FilterConfig": parts[PolicyPart.FILTER],
        "ScorerConfig": parts[PolicyPart.SCORER],
    }
    options = {s.config: None for specs in (*kinds.values(), *own.values()) for s in specs}
    models: list[type[BaseModel]] = [Config, *options]
    refs, document = models_json_schema(
        [(m, "validation") for m in models], ref_template=_REF, schema_generator=GenerateJsonSchema
    )
    defs = document["$defs"]
    for kind, specs in kinds.items():
        defs[f"{kind}_component"] = _component(defs["Component"], specs, refs)
    for model, specs in own.items():
        defs[model] = _component(defs[model], specs, refs)
    root = defs.pop(_name(refs[Config, "validation"]))
    for model, key, kind in (
        ("PoolConfig", "engine", "engine"),
        ("PrefillConfig", "engine", "engine"),
        ("HandoffConfig", "transport", "transport"),
        ("AdmissionConfig", "order", "admission"),
        ("PolicyConfig", "prefill", "policy"),
    ):
        if key in defs[model]["properties"]:
            _refer(defs[model], key, kind)
    _refer(root, "launcher", "launcher")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": defs}


def _name(ref: dict[str, Any]) -> str:
    return str(ref["$ref"]).rsplit("/", 1)[-1]


def _component(base: dict[str, Any], specs: Sequence[PluginSpec], refs: Any) -> dict[str, Any]:
    properties = {**base["properties"], "type": {**base["properties"]["type"], "enum": [s.name for s in specs]}}
    rules = [
        {
            "if": {"properties": {"type": {"const": spec.name}}},
            "then": {"properties": {"config": refs[spec.config, "validation"]}},
        }
        for spec in specs
    ]
    return {**base, "properties": properties, **({"allOf": rules} if rules else {})}


def _refer(model: dict[str, Any], key: str, kind: str) -> None:
    old = model["properties"][key]
    model["properties"][key] = {
        "$ref": _REF.format(model=f"{kind}_component"),
        **({"description": old["description"]} if "description" in old else {}),
    }
