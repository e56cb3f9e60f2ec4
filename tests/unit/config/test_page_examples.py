"""The YAML of the pages is what the code takes: whole files as they stand, sections beside a plain rest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pdhub.api import ConfigError, PluginError
from pdhub.config.build import build_plan, parse_config
from pdhub.config.load import parse
from pdhub.config.models import Config
from pdhub.registry import load

ROOT = Path(__file__).parents[3]
PATTERNS = ("README.md", "docs/*.md", "engines/*/README.md", "plugins/*/README.md")
PAGES = [page for pattern in PATTERNS for page in ROOT.glob(pattern)]
REST: dict[str, Any] = {
    "model": {"name": "m"},
    "pools": [{"name": "p", "engine": {"type": "openai"}, "nodes": [{"name": "n", "port": 9001, "launch": False}]}],
    "policy": {"type": "slo"},
}
LACKS = {
    "docs/tilert.md:0": "config.json",  # of a model that is not here
    "engines/tilert/README.md:0": "--kv-cache-dtype",  # servers' arguments, left out for shortness
}
EXAMPLES = {
    f"{page.relative_to(ROOT)}:{number}": text
    for page in sorted(PAGES)
    for number, text in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_taken(name: str) -> None:
    data, _ = parse(EXAMPLES[name].replace("…", ""), name)
    if not data.keys() <= Config.model_fields.keys():
        pytest.skip("the inside of a section")
    if "version" in data:
        assert REST.keys() <= data.keys(), "a file that says its version is a whole one"
    data = {**REST, **data}
    data["model"] = {**REST["model"], **data["model"]}
    try:
        build_plan(parse_config(data), load(warn=False))
    except PluginError as error:
        pytest.skip(f"not installed: {error.message}")
    except ConfigError as error:
        if name not in LACKS or LACKS[name] not in error.message:
            raise
