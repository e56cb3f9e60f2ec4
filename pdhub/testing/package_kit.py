"""The conformance kit for plugin distributions: is the package what the host expects?

::

    class TestPackage(PackageConformance):
        distribution = "pdhub-myengine"
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest
from pydantic import BaseModel

from pdhub.api import API_VERSION, PROJECT, PluginSpec

HEAVY = ("torch", "vllm", "transformers", "fastapi", "nixl", "mooncake", "tilert")

_PROBE = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
specs = []
for name in dir(module):
    if name.startswith("pdhub_register_"):
        specs += [(spec.kind, spec.name) for spec in getattr(module, name)()]
print(json.dumps({"heavy": sorted(set(json.loads(sys.argv[2])) & set(sys.modules)), "specs": specs}))
"""


class PackageConformance:
    """Rules for an installed distribution."""

    distribution: str = ""

    @pytest.fixture
    def entry_points(self) -> list[metadata.EntryPoint]:
        assert self.distribution, "set `distribution` to the name in pyproject.toml"
        found = metadata.distribution(self.distribution).entry_points
        return [entry for entry in found if entry.group == PROJECT]

    @pytest.fixture
    def specs(self, entry_points: list[metadata.EntryPoint]) -> list[PluginSpec]:
        out: list[PluginSpec] = []
        for entry in entry_points:
            module = entry.load()
            for name in dir(module):
                if name.startswith("pdhub_register_"):
                    out += list(getattr(module, name)())
        return out

    def test_K01_it_has_an_entry_point(self, entry_points: list[metadata.EntryPoint]) -> None:
        """Without one, ``pip install`` changes nothing."""
        assert entry_points, f"{self.distribution} has no entry point in group {PROJECT!r}"

    def test_K02_registering_is_light(self, entry_points: list[metadata.EntryPoint]) -> None:
        """Every process loads every plugin's specs; torch in the router costs seconds and gigabytes."""
        for entry in entry_points:
            out = subprocess.run(
                [sys.executable, "-c", _PROBE, entry.module, json.dumps(HEAVY)],
                capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            assert out.returncode == 0, out.stderr
            assert json.loads(out.stdout.splitlines()[-1])["heavy"] == [], "imported while registering"

    def test_K03_it_registers_something(self, specs: list[PluginSpec]) -> None:
        """An entry point whose hooks return nothing is a packaging fault."""
        assert specs

    def test_K04_options_are_documented_and_strict(self, specs: list[PluginSpec]) -> None:
        """A misspelt option that is ignored is found in production."""
        for spec in specs:
            assert issubclass(spec.config, BaseModel)
            assert spec.config.model_config.get("extra") == "forbid", f"{spec.name}: unknown keys must be errors"
            for name, field in spec.config.model_fields.items():
                assert field.description, f"{spec.name}: option {name} has no description"

    def test_K05_api_version_fits(self, specs: list[PluginSpec]) -> None:
        """The host refuses others at start."""
        for spec in specs:
            assert spec.api_version[0] == API_VERSION[0]
            assert spec.api_version[1] <= API_VERSION[1]

    def test_K06_names_are_unique(self, specs: list[PluginSpec]) -> None:
        """Two plugins of one name and kind are refused."""
        keys = [(spec.kind, getattr(spec, "part", ""), spec.name) for spec in specs]
        assert len(set(keys)) == len(keys)

    def test_K07_it_says_what_it_is(self, specs: list[PluginSpec]) -> None:
        """``pdhub plugins`` shows the summary; the registry shows the readme."""
        for spec in specs:
            assert spec.summary.strip()
        meta = metadata.metadata(self.distribution)
        assert meta["Summary"], "no description in pyproject.toml"
        assert meta["Requires-Python"], "no requires-python"

    def test_K08_it_depends_on_pdhub(self) -> None:
        """Otherwise an installer may leave an incompatible host in place."""
        requires = metadata.requires(self.distribution) or []
        assert any(r.replace(" ", "").startswith("pdhub") for r in requires)
