"""The two hooks that are not registration: one may veto, the other can harm nobody."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest

from pdhub.api import ConfigError, PluginError, RequestRecord, hookimpl
from pdhub.registry import load

RECORD = RequestRecord("r", "m", None, None, None, "no-slo", "ok")


def plugin(**hooks: Any) -> ModuleType:
    module = ModuleType("inline")
    vars(module).update({name: hookimpl(function) for name, function in hooks.items()})
    return module


def test_configured_gets_read_only_data() -> None:
    seen: list[Mapping[str, Any]] = []

    def pdhub_configured(config: Mapping[str, Any]) -> None:
        seen.append(config)
        with pytest.raises(TypeError):
            config["router"]["port"] = 1

    load(extra=[plugin(pdhub_configured=pdhub_configured)]).configured({"router": {"port": 8000}, "pools": [{}]})
    assert seen[0]["router"]["port"] == 8000


def test_configured_may_veto() -> None:
    def pdhub_configured(config: Mapping[str, Any]) -> None:
        raise ConfigError("not on Fridays", where="router", hint="wait")

    with pytest.raises(ConfigError, match="not on Fridays"):
        load(extra=[plugin(pdhub_configured=pdhub_configured)]).configured({})


def test_a_failing_configured_hook_has_a_name() -> None:
    def pdhub_configured(config: Mapping[str, Any]) -> None:
        raise KeyError("oops")

    with pytest.raises(PluginError, match=r"pdhub_configured raised KeyError"):
        load(extra=[plugin(pdhub_configured=pdhub_configured)]).configured({})


def test_every_observer_hears_of_a_request_and_one_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []

    def good(record: RequestRecord) -> None:
        heard.append(record.id)

    def bad(record: RequestRecord) -> None:
        raise ValueError("disk full")

    registry = load(extra=[plugin(pdhub_request_finished=bad), plugin(pdhub_request_finished=good)])
    assert registry.has_observers
    with caplog.at_level(logging.ERROR, "pdhub.registry"):
        registry.request_finished(RECORD)
    assert heard == ["r"]
    assert "disk full" in caplog.text


def test_nobody_observes_by_default() -> None:
    assert not load(block=["pdhub-transformers"]).has_observers
