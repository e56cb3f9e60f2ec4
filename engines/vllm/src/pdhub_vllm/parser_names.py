"""Prints the names of the parsers that a vLLM has, as JSON. Run by the Python of that vLLM, which is not imported (that
takes many seconds): its registries are read as source. Standard library only.

``{"python": …, "vllm": directory or null, "reasoning": [names], "tools": [names]}``; null instead of a list if the
registry is not where it is looked for.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path

REGISTRIES = {
    "reasoning": ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
    "tools": ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
}


def names(package: Path, kind: str) -> list[str] | None:
    """Of one registry.

    Args:
        package: directory of the package ``vllm``. kind: ``reasoning`` or ``tools``.
    """
    folder, variable = REGISTRIES[kind]
    try:
        tree = ast.parse((package / folder / "__init__.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return None
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == variable for t in targets):
            keys = node.value.keys if isinstance(node.value, ast.Dict) else []
            return sorted(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
    return None


def found() -> dict[str, object]:
    """What this Python has."""
    spec = importlib.util.find_spec("vllm")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        return {"python": sys.executable, "vllm": None, "reasoning": None, "tools": None}
    package = Path(places[0])
    return {
        "python": sys.executable,
        "vllm": str(package),
        **{kind: names(package, kind) for kind in REGISTRIES},
    }


if __name__ == "__main__":
    del sys.path[0]  # the directory of this file, whose modules have names that others have too
    print(json.dumps(found()))
