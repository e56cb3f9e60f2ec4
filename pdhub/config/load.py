"""Read a YAML file: safe types only, a key twice is an error, and every value remembers its line."""

from __future__ import annotations

import re
from pathlib import Path as FilePath
from typing import Any

import yaml

from pdhub.api.errors import ConfigError
from pdhub.config.origin import Origins, Path


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: ``no`` and ``on`` are text, ``12:30`` is no number, a date is text."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf)|\.(nan|NaN)", "-+.0123456789"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("merge", r"<<", "<"),
):
    _resolver = re.compile(rf"^(?:{_pattern})$")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _resolver, [*_first.replace("\0", "")])
    if "\0" in _first:
        _Loader.yaml_implicit_resolvers.setdefault("", []).append((f"tag:yaml.org,2002:{_tag}", _resolver))


def _decimal(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 0) if re.match(r"0[ox]", text) else int(text)  # 007 is 7, as in YAML 1.2


_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)


def read(path: str | FilePath) -> tuple[dict[str, Any], Origins]:
    """The file's content and the origin of each value.

    Raises:
        ConfigError: it cannot be read, is not YAML, has a key twice, or is no mapping.
    """
    file = FilePath(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{file}: no such file", hint="give the path of a YAML file, such as configs/quickstart.yaml"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text: {error.reason}", hint="save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read: {error.strerror}", hint="check the path and its permissions"
        ) from None
    return parse(text, str(file))


def parse(text: str, name: str) -> tuple[dict[str, Any], Origins]:
    """As :func:`read`, from text; ``name`` is the file's name in messages."""
    origins = Origins()
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:
        hint = "remove the characters named above"
        raise ConfigError(f"{name}: not valid YAML: {error}", hint=hint) from None
    try:
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(f"{name}: the file is empty", hint="`pdhub config docs` lists every key")
        data = _Builder(loader, name, origins).build(root, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        hint = "check indentation, quotes and colons near this line"
        raise ConfigError(f"{name}{line}: not valid YAML: {error.problem or error.context}", hint=hint) from None
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise ConfigError(f"{name}:1: the file must hold keys such as `model:` and `pools:`", hint="see docs/config.md")
    return data, origins


def scalar(text: str) -> Any:
    """A value as YAML reads it, for flags and environment variables. Raises ConfigError."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise ConfigError(f"not a YAML value: {text!r}", hint="quote it, for example '\"a: b\"'") from None


class _Builder:
    """Nodes → values, noting lines on the way."""

    def __init__(self, loader: _Loader, name: str, origins: Origins) -> None:
        self._loader = loader
        self._name = name
        self._origins = origins
        self._open: list[yaml.Node] = []

    def build(self, node: yaml.Node, path: Path) -> Any:
        if any(node is parent for parent in self._open):
            raise ConfigError(f"{self._at(node)}: an alias contains itself", hint="write the value out")
        if isinstance(node, yaml.CollectionNode) and node.tag.rsplit(":", 1)[-1] not in ("map", "seq"):
            hint = "write a plain mapping or list"
            raise ConfigError(f"{self._at(node)}: not valid YAML here: the tag {node.tag}", hint=hint)
        self._origins.set(path, self._at(node) if path else self._name)
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]
            return self._loader.construct_object(node, deep=True)
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{self._at(key)}: a key must be text", hint="remove the brackets around the key")
            if key.value in seen and key.value != "<<":
                message = f"{self._at(key)}: the key '{key.value}' was already given on line {seen[key.value]}"
                raise ConfigError(message, hint="keep one of the two")
            seen[key.value] = key.start_mark.line + 1
        self._loader.flatten_mapping(node)
        out: dict[str, Any] = {}
        for key, value in node.value:  # merged keys come first, the mapping's own replace them
            place = (*path, key.value)
            out[key.value] = self.build(value, place)
            if not isinstance(value, yaml.CollectionNode):
                self._origins.set(place, self._at(key))
        return out

    def _at(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}"
