"""The names of a new plugin: in YAML, as a distribution, as a package, in class names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pdhub.api.errors import ConfigError
from pdhub.registry import load
from pdhub.registry.providers import KNOWN_PROVIDERS

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Names:
    """``my-engine`` → ``pdhub-my-engine``, ``pdhub_my_engine``, ``MyEngine``."""

    name: str

    @property
    def distribution(self) -> str:
        return f"pdhub-{self.name.replace('_', '-')}"

    @property
    def package(self) -> str:
        return f"pdhub_{self.name.replace('-', '_')}"

    @property
    def camel(self) -> str:
        return "".join(word.capitalize() for word in re.split(r"[-_]", self.name))


def check_name(kind: str, name: str) -> Names:
    """The names. Raises ConfigError for one that cannot work or that somebody provides already."""
    if len(name) > 50 or not _NAME.fullmatch(name):
        better = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")[:50].rstrip("-")
        hint = "lower-case letters, digits and single dashes, a letter first" + (
            f"; such as '{better}'" if better else ""
        )
        raise ConfigError(f"'{name}' cannot be a plugin's name", hint=hint)
    if name in load(warn=False).names(kind):
        raise ConfigError(f"an installed plugin already provides the {kind} '{name}'", hint="choose another name")
    if name in KNOWN_PROVIDERS:
        raise ConfigError(f"'{name}' is the name of {KNOWN_PROVIDERS[name]}", hint="choose another name")
    return Names(name)
