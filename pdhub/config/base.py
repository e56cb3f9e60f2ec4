"""What all parts of the configuration's models share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")]


class Model(BaseModel):
    """Base: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Component(Model):
    """The same triple everywhere: which plugin, an optional name, and the plugin's own options."""

    type: str = Field(description="Name of the plugin, as `pdhub plugins` lists it.")
    name: str | None = Field(None, description="A name for logs; default is the type.")
    config: dict[str, Any] = Field(default_factory=dict, description="Options, validated by the plugin's own model.")
