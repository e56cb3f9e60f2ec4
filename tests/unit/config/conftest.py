"""A registry with one plugin of each kind, and YAML files."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import Field

from pdhub.api import EngineClient, EngineSpec, LegOrder, PluginConfig, PolicySpec, hookimpl
from pdhub.registry import Registry, load

Write = Callable[[str], Path]

BASE = """\
model: {name: m}
pools:
  - name: fast
    engine: {type: demo}
    nodes:
      - {name: fast-0, port: 9001}
  - name: general
    engine:
      type: demo
      config:
        slots: 4
    nodes:
      - {name: general-0, port: 9002}
prefill:
  - {name: prefill-0, port: 9003, engine: {type: demo}}
policy: {type: demo, config: {pool: fast}}
"""


class Inner(PluginConfig):
    depth: int = Field(1, description="A nested option.")


class DemoConfig(PluginConfig):
    slots: int = Field(1, ge=1, description="Requests at once.")
    api_key: str = Field("", max_length=3, description="A secret.")
    inner: Inner = Field(default_factory=Inner, description="Nested.")
    many: list[Inner] = Field(default_factory=list, description="Nested in a list.")
    by_name: dict[str, Inner] = Field(default_factory=dict, description="Nested in a mapping.")


class DemoPolicyConfig(PluginConfig):
    pool: str = Field("fast", description="A pool.")

    def check(self, pools: list[str]) -> None:
        if self.pool not in pools:
            raise ValueError(f"pool names no pool: '{self.pool}'")


def _client(order: LegOrder) -> Callable[[object], EngineClient]:
    def make(config: object) -> EngineClient:
        return type("Client", (), {"order": order})()  # type: ignore[return-value]

    return make


def _never(*_: object) -> None:
    raise AssertionError("nothing is instantiated while a configuration is validated")


@pytest.fixture(scope="session")
def registry() -> Registry:
    plugin = ModuleType("demo")

    @hookimpl
    def pdhub_register_engines() -> list[EngineSpec]:
        return [
            EngineSpec(name="demo", summary="x", config=DemoConfig, runtime=_never, prefill=_never),  # type: ignore[arg-type]
            EngineSpec(name="alone", summary="x", client=_client(LegOrder.DECODE_ONLY)),
            EngineSpec(name="split", summary="x", client=_client(LegOrder.PREFILL_FIRST)),
            EngineSpec(name="source", summary="x", prefill=_never),  # type: ignore[arg-type]
        ]

    @hookimpl
    def pdhub_register_policies() -> list[PolicySpec]:
        return [PolicySpec(name="demo", summary="x", config=DemoPolicyConfig, factory=_never)]  # type: ignore[arg-type]

    vars(plugin).update(pdhub_register_engines=pdhub_register_engines, pdhub_register_policies=pdhub_register_policies)
    return load(extra=[plugin], warn=False)


@pytest.fixture
def base() -> str:
    return BASE


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "c.yaml"
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the developer's shell changes a test."""
    import os

    for name in list(os.environ):
        if name.startswith("PDHUB_"):
            monkeypatch.delenv(name)
