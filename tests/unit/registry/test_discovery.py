"""Entry points are loaded one by one: a broken one breaks nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pdhub.api import EngineSpec, PluginError, hookimpl
from pdhub.registry import PluginRow, Registry, Status, load
from pdhub.registry.catalog import unknown_error
from pdhub.registry.discover import Source
from pdhub.registry.providers import KNOWN_KINDS, KNOWN_PROVIDERS

Code = Callable[..., str]


def row(registry: Registry, name: str) -> PluginRow:
    return next(r for r in registry.rows() if r.name == name)


def test_an_installed_plugin_is_found(install: Any, engine_code: Code) -> None:
    install("shiny", engine_code("shiny"))
    registry = load()
    assert registry.engine("shiny").summary == "x"
    found = row(registry, "shiny")
    assert (found.kind, found.distribution, found.version) == ("engine", "pdhub-shiny", "1.2")
    assert (found.stability, found.status, found.error) == ("alpha", Status.OK, "")


@pytest.mark.parametrize(
    "fault",
    ["raise RuntimeError('no driver')", "import not_there_at_all", "raise SystemExit(3)", "this is no python"],
)
def test_an_import_that_raises_is_one_red_row(
    install: Any, engine_code: Code, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    install("bad", fault)
    install("good", engine_code("good"))
    with caplog.at_level(logging.WARNING, "pdhub.registry"):
        registry = load()
    assert registry.engine("good")
    found = row(registry, "bad")
    assert found.status is Status.BROKEN
    assert "fake_bad" in found.error
    assert "\n" not in found.error
    assert len([r for r in caplog.records if "pdhub-bad" in r.message]) == 1


def test_a_broken_plugin_is_warned_about_once_a_process(install: Any, caplog: pytest.LogCaptureFixture) -> None:
    install("bad", "raise RuntimeError('no driver')")
    load(warn=False)
    assert not caplog.records
    for _ in range(3):
        assert row(load(), "bad").status is Status.BROKEN
    install("worse", "raise RuntimeError('no card')")
    load()
    said = [r.message for r in caplog.records if r.name == "pdhub.registry"]
    assert [("no driver" in one, "no card" in one) for one in said] == [(True, False), (False, True)]


def test_naming_a_broken_plugin_says_why_it_is_broken(install: Any) -> None:
    install("bad", "raise RuntimeError('no driver')")
    with pytest.raises(PluginError) as caught:
        load().engine("bad")
    assert "RuntimeError: no driver" in caught.value.message
    assert "pdhub-bad" in str(caught.value.hint)


def test_a_broken_plugin_is_fatal_if_strict(install: Any) -> None:
    install("bad", "raise RuntimeError('no driver')")
    with pytest.raises(PluginError, match="no driver"):
        load(strict=True)


def test_a_blocked_distribution_is_not_imported(install: Any) -> None:
    install("bad", "raise RuntimeError('must not run')")
    registry = load(block=["PDHub_Bad"], strict=True)
    found = row(registry, "bad")
    assert (found.status, found.error) == (Status.BLOCKED, "blocked by plugins.block")
    with pytest.raises(PluginError, match="blocked") as caught:
        registry.engine("bad")
    assert "plugins.block" in str(caught.value.hint)


def test_two_plugins_of_one_name_are_both_set_aside(install: Any, engine_code: Code) -> None:
    install("one", engine_code("same"))
    install("two", engine_code("same"))
    registry = load()
    assert "same" not in registry.names("engine")
    with pytest.raises(PluginError) as caught:
        registry.engine("same")
    for distribution in ("pdhub-one", "pdhub-two"):
        assert distribution in caught.value.message
        assert distribution in str(caught.value.hint)
    assert [r.status for r in registry.rows() if r.name == "same"] == [Status.BROKEN] * 2
    with pytest.raises(PluginError, match="pdhub-one"):
        load(strict=True)
    assert load(block=["pdhub-two"]).engine("same")


def test_one_name_in_two_kinds_is_no_clash(install: Any, engine_code: Code) -> None:
    install(
        "both",
        """
        from pdhub.api import EngineSpec, TransportSpec, hookimpl

        @hookimpl
        def pdhub_register_engines():
            return [EngineSpec(name="both", summary="x", runtime=lambda config, context: None)]

        @hookimpl
        def pdhub_register_transports():
            return [TransportSpec(name="both", summary="x", factory=lambda config: None)]
        """,
    )
    registry = load()
    assert registry.engine("both")
    assert registry.transport("both")


def test_a_class_is_no_plugin(install: Any) -> None:
    install("klass", "class Plugin: pass", entry="fake_klass:Plugin")
    assert "is a class" in row(load(), "klass").error


def test_extra_plugins_are_registered_once_even_if_installed(install: Any, engine_code: Code) -> None:
    install("shiny", engine_code("shiny"))
    import fake_shiny  # type: ignore[import-not-found]

    assert load(extra=[fake_shiny], strict=False).engine("shiny")


def test_extra_objects_need_no_module() -> None:
    @hookimpl
    def pdhub_register_engines() -> list[EngineSpec]:
        return [EngineSpec(name="inline", summary="x", runtime=lambda config, context: None)]  # type: ignore[arg-type, return-value]

    plugin = ModuleType("inline")
    vars(plugin)["pdhub_register_engines"] = pdhub_register_engines
    assert load(extra=[plugin]).engine("inline")


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_a_known_name_says_what_to_install(name: str) -> None:
    with pytest.raises(PluginError) as caught:
        load().engine(name)
    assert caught.value.hint == f"pdhub-{name} provides it: pip install pdhub-{name}"


def test_an_unknown_name_lists_what_is_installed_and_the_nearest(install: Any, engine_code: Code) -> None:
    install("shiny", engine_code("shiny"))
    with pytest.raises(PluginError) as caught:
        load().engine("shinny")
    assert "shiny" in caught.value.message
    assert "did you mean 'shiny'?" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("kind", "name", "meant", "provider"),
    [
        ("transport", "nixle", "nixl", "pdhub-nixl"),
        ("transport", "moncake", "mooncake", "pdhub-mooncake"),
        ("engine", "vlm", "vllm", "pdhub-vllm"),
        ("engine", "tilert_node", "tilert-node", "pdhub-tilert"),
    ],
)
def test_a_name_that_nearly_is_a_known_plugins_says_what_to_install(
    kind: str, name: str, meant: str, provider: str
) -> None:
    hint = str(unknown_error(kind, name, ["toy", "tcp"], []).hint)
    assert hint == f"did you mean '{meant}'? {provider} provides it: pip install {provider}"
    assert unknown_error(kind, name, [meant], []).hint == f"did you mean '{meant}'?"
    broken = Source(meant, provider, "1.0", error="no driver")
    assert "pip install" not in str(unknown_error(kind, name, [], [broken]).hint)


def test_no_plugin_of_another_kind_is_suggested() -> None:
    assert "did you mean" not in str(unknown_error("engine", "nixle", ["toy"], []).hint)


def test_every_suggestion_has_a_provider() -> None:
    assert {name for names in KNOWN_KINDS.values() for name in names} == set(KNOWN_PROVIDERS)


def test_an_unhashable_object_is_a_broken_row_and_no_crash() -> None:
    registry = load(extra=[SimpleNamespace()])
    assert "unhashable" in row(registry, "SimpleNamespace").error
